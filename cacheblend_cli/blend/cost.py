"""The loading controller (CacheBlend, EuroSys'25, arXiv 2405.16444, section 5.1): how much repair is free.

While a layer is recomputed, the KV of the next one is loaded. The controller takes the largest recompute ratio at which
recomputing a layer takes no longer than loading the next, at least a floor; and a full prefill where that is estimated
to be faster than loading and blending. A pure function of speeds and workload; measuring is in speeds.py.

The cost of a layer is layer_s + rows * row_s + pairs * pair_s, pairs being (row, key it attends to). With s chosen and
f fresh rows of n that are not exact, a blended prefill computes

| layer                  | rows                                                                        |
|------------------------|-----------------------------------------------------------------------------|
| before the check layer | n; at layer 0 the cached ones without K and V, which do not depend on context |
| the check layer        | K and V of n, the rest of s + f                                             |
| after it               | s + f                                                                       |
| the last               | K and V of the rows before, the rest of one                                 |

A selector without a check layer chooses before layer 0, so every layer has s + f rows. One that follows the question's
attention first runs the f fresh rows through the layers it looks at, whose KV it waits for: what is loaded by then hides
no recompute any more. Where what is not recomputed is moved (`corrections.py`), each layer behind the choice takes moved_s
for each row of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FULL, BLEND = "full", "blend"


@dataclass(frozen=True)
class Speeds:
    """What a machine takes for a model. Seconds: of a layer whatever its rows, of a row, of a row's look at one key, of
    the output head, and from the prefill's end to the first token. bytes_per_s: of KV from the store into the pool, read,
    checked and placed; inf when there was nothing to measure it with. prefills: how many it has learnt from; not_loaded:
    how many of them in a row loaded nothing, so that nothing was learnt about loading. moved_s: of a row that is moved, in a
    layer."""

    layer_s: float
    row_s: float
    pair_s: float
    head_s: float
    rest_s: float = 0.0
    bytes_per_s: float = math.inf
    prefills: int = 0
    not_loaded: int = 0
    moved_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    """One prompt. inexact: cached tokens whose KV needs repair; fresh: tokens computed in any case; *_keys: how many keys
    one of them sees on average. kv_bytes: to load, of all layers. kv_share: of a row's work in a layer, K and V's part.
    check_layer: 0 for a selector that needs none. layer0_exact: stored K and V of layer 0 stand as they are. probe_layers:
    the first layers, which the fresh rows run through before tokens are chosen; draft_tokens: rows that then run through
    all of them, one by one. corrected: what is not recomputed is moved."""

    num_layers: int
    total: int
    inexact: int
    inexact_keys: float
    fresh: int
    fresh_keys: float
    kv_bytes: int
    kv_share: float
    check_layer: int = 1
    layer0_exact: bool = True
    probe_layers: int = 0
    draft_tokens: int = 0
    corrected: bool = False


@dataclass(frozen=True)
class Estimate:
    """Seconds of a prefill. compute_s and load_s run at the same time; stall_s: how long computing waits for KV."""

    prefill_s: float
    compute_s: float
    load_s: float
    stall_s: float


@dataclass(frozen=True)
class Decision:
    """mode: "blend" at `ratio`, or "full" (ratio 1). layer_compute_s at that ratio after the check layer, layer_load_s: what
    is weighed against each other. chosen, full: the estimates of what was decided and of a full prefill."""

    mode: str
    ratio: float
    floor: float
    layer_compute_s: float
    layer_load_s: float
    chosen: Estimate
    full: Estimate


def decide(speeds: Speeds, work: Workload, floor: float) -> Decision:
    """The ratio that is free, at least `floor`; a full prefill when that is estimated to be no slower.

    With nothing cached the two are one, and it is called blend: what had to be computed is then stored afterwards.
    """
    ratio = min(1.0, max(floor, free_ratio(speeds, work)))
    blend, full = estimate(speeds, work, ratio), estimate_full(speeds, work)
    load = _layer_load_s(speeds, work)
    if work.kv_bytes and full.prefill_s <= blend.prefill_s:
        return Decision(FULL, 1.0, floor, _layer_s(speeds, *_full_rows(work)), load, full, full)
    chosen = _chosen(work, ratio)
    compute = _layer_s(speeds, *_rows(work, chosen, work.num_layers // 2)) + _moved_s(speeds, work, chosen)
    return Decision(BLEND, ratio, floor, compute, load, blend, full)


def free_ratio(speeds: Speeds, work: Workload) -> float:
    """The largest share of the inexact tokens whose recompute in a layer hides under the loading of the next, of what is
    still to load when tokens are chosen; 0 when even the fresh rows take longer, or nothing needs repair."""
    if not work.inexact:
        return 0.0
    probed, _ = _probe_s(speeds, work)
    room = (
        _layer_load_s(speeds, work)
        - probed / work.num_layers
        - _layer_s(speeds, work.fresh, work.fresh * work.fresh_keys)
    )
    each = speeds.row_s + work.inexact_keys * speeds.pair_s
    if work.corrected:  # a row is recomputed or moved
        room, each = room - work.inexact * speeds.moved_s, each - speeds.moved_s
    if room <= 0:
        return 0.0
    return min(1.0, room / each / work.inexact) if each > 0 else 1.0


def estimate(speeds: Speeds, work: Workload, ratio: float) -> Estimate:
    """Of a blended prefill. A layer starts when the one before is computed and its own KV is there."""
    chosen, load = _chosen(work, ratio), _layer_load_s(speeds, work)
    checked = work.check_layer if 0 < chosen < work.inexact else 0  # ratio 0 and 1: nothing to choose
    now, compute = _probe_s(speeds, work) if 0 < chosen < work.inexact else (0.0, 0.0)
    for layer in range(work.num_layers):
        seconds = _layer_s(speeds, *_rows(work, chosen, layer, checked))
        seconds += _moved_s(speeds, work, chosen) if layer > checked else 0.0
        now = max(now, (layer + 1) * load) + seconds
        compute += seconds
    return Estimate(now + speeds.head_s, compute + speeds.head_s, work.num_layers * load, max(0.0, now - compute))


def estimate_full(speeds: Speeds, work: Workload) -> Estimate:
    """Of a full prefill, which loads nothing."""
    rows, pairs = _full_rows(work)
    last = _layer_s(speeds, work.kv_share * rows + (1 - work.kv_share), work.total)
    seconds = (work.num_layers - 1) * _layer_s(speeds, rows, pairs) + last + speeds.head_s
    return Estimate(seconds, seconds, 0.0, 0.0)


def learn(speeds: Speeds, predicted_s: float, computed_s: float, kv_bytes: int, load_s: float, rest_s: float) -> Speeds:
    """The speeds after one more prefill, as running averages.

    predicted_s and computed_s: estimate and measure of its computing alone; kv_bytes, load_s: what it loaded in which
    time (0: nothing); rest_s: from its end to the first token.
    """
    share = max(_NEW, 1 / (speeds.prefills + 2))  # the measurement counts as one prefill
    factor = (computed_s / predicted_s) if predicted_s > 0 and computed_s > 0 else 1.0
    factor = min(_MOST, max(1 / _MOST, factor)) ** share  # one odd run does not spoil what many have said
    bytes_per_s = speeds.bytes_per_s
    if kv_bytes and load_s > 0:
        found = kv_bytes / load_s
        bytes_per_s = found if math.isinf(bytes_per_s) else bytes_per_s ** (1 - share) * found**share
    return Speeds(
        layer_s=speeds.layer_s * factor,
        row_s=speeds.row_s * factor,
        pair_s=speeds.pair_s * factor,
        head_s=speeds.head_s * factor,
        moved_s=speeds.moved_s * factor,
        rest_s=max(0.0, (1 - share) * speeds.rest_s + share * rest_s),
        bytes_per_s=bytes_per_s,
        prefills=speeds.prefills + 1,
        not_loaded=0 if kv_bytes else speeds.not_loaded + 1,
    )


_NEW = 0.1  # share of the newest prefill in a running average that is old
_MOST = 4.0


def _chosen(work: Workload, ratio: float) -> int:
    return min(work.inexact, math.ceil(ratio * work.inexact - 1e-9))


def _layer_load_s(speeds: Speeds, work: Workload) -> float:
    return work.kv_bytes / work.num_layers / speeds.bytes_per_s


def _probe_s(speeds: Speeds, work: Workload) -> tuple[float, float]:
    """When tokens are chosen, and how much of it was computing. A layer of the probe starts when its KV is there."""
    seconds, load = _layer_s(speeds, work.fresh, work.fresh * work.fresh_keys), _layer_load_s(speeds, work)
    now = 0.0
    for layer in range(work.probe_layers):
        now = max(now, (layer + 1) * load) + seconds
    draft = work.draft_tokens * (work.num_layers * _layer_s(speeds, 1, work.total) + speeds.head_s)
    return now + draft, work.probe_layers * seconds + draft


def _layer_s(speeds: Speeds, rows: float, pairs: float) -> float:
    return speeds.layer_s + rows * speeds.row_s + pairs * speeds.pair_s


def _moved_s(speeds: Speeds, work: Workload, chosen: int) -> float:
    """What moving the others takes in a layer behind the choice; nobody says how where nothing is recomputed."""
    return speeds.moved_s * (work.inexact - chosen) if work.corrected and chosen else 0.0


def _full_rows(work: Workload) -> tuple[float, float]:
    return work.total, work.total * (work.total + 1) / 2


def _rows(work: Workload, chosen: int, layer: int, check: int = 0) -> tuple[float, float]:
    """(rows, pairs) of a layer, rows as parts of one row's work. check: the layer at which tokens are chosen, 0: before all."""
    candidates = work.inexact if check and layer <= check else chosen
    done = work.inexact if layer < check else chosen
    kv_rows = candidates + work.fresh
    if layer == 0 and work.layer0_exact:
        kv_rows = work.fresh
    rest = done + work.fresh
    pairs = done * work.inexact_keys + work.fresh * work.fresh_keys
    if layer == work.num_layers - 1:
        rest, pairs = 1, work.total
    return work.kv_share * kv_rows + (1 - work.kv_share) * rest, pairs
