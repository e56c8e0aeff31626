"""The loading controller (CacheBlend, EuroSys'25, arXiv 2405.16444, section 5.1): how much repair is free.

While a layer is recomputed, the KV of the next one is loaded. The controller takes the largest recompute ratio at which
recomputing a layer takes no longer than loading the next, at least a floor; or a full prefill if it is estimated to be
faster than loading and blending. A pure function of speeds and workload; speeds.py measures the speeds.

The cost of a layer is layer_s + rows * row_s + pairs * pair_s, pairs being (row, key it attends to). With s chosen rows
and f fresh rows among n that are not exact, a blended prefill computes

| layer                  | rows                                                                        |
|------------------------|-----------------------------------------------------------------------------|
| before the check layer | n; at layer 0 the cached ones without K and V, which do not depend on context |
| the check layer        | K and V of n, the rest of s + f                                             |
| after it               | s + f                                                                       |
| the last               | K and V of the rows before, the rest of one                                 |

A selector without a check layer chooses before layer 0, so every layer has s + f rows. A selector that follows the
question's attention first runs the f fresh rows through the layers it probes, and waits for their KV: KV loaded by then
no longer hides recomputation. Where stale KV is corrected (`corrections.py`), each layer after the choice takes moved_s
per corrected row.
"""

from __future__ import annotations

import math

from cacheblend_cli.types import Decision, Estimate, Speeds, Workload


def decide(speeds: Speeds, work: Workload, floor: float, full: Speeds | None = None) -> Decision:
    """Return the largest ratio that is free, at least `floor`; or a full prefill if it is estimated to be no slower.
    full: speeds of full prefills, None if they are the same."""
    ratio = min(1.0, max(floor, free_ratio(speeds, work)))
    return or_full(at_ratio(speeds, work, ratio, floor, full), work, full or speeds)


def at_ratio(speeds: Speeds, work: Workload, ratio: float, floor: float, full: Speeds | None = None) -> Decision:
    """Return the decision for a blended prefill at this ratio, with the estimates. full: as for `decide`."""
    chosen = _chosen(work, ratio)
    compute = _layer_s(speeds, *_rows(work, chosen, work.num_layers // 2)) + _moved_s(speeds, work, chosen)
    both = estimate(speeds, work, ratio), estimate_full(full or speeds, work)
    return Decision("blend", ratio, floor, compute, _layer_load_s(speeds, work), *both)


def or_full(blend: Decision, work: Workload, full: Speeds) -> Decision:
    """Return the decision for a full prefill if it is estimated to be no slower than the blended one.

    With nothing cached the two are the same, and the mode is blend: chunks that had to be computed are stored
    afterwards.
    """
    if work.kv_bytes and blend.full.prefill_s <= blend.chosen.prefill_s:
        layer_s = _layer_s(full, *_full_rows(work))
        return Decision("full", 1.0, blend.floor, layer_s, blend.layer_load_s, blend.full, blend.full)
    return blend


def free_ratio(speeds: Speeds, work: Workload) -> float:
    """Return the largest share of the inexact tokens whose recomputation in a layer is hidden by loading the next one.

    Counts only KV still to load when tokens are chosen. 0 if the fresh rows alone take longer, or if nothing needs
    repair.
    """
    if not work.inexact:
        return 0.0
    probed, _ = _probe_s(speeds, work)
    room = (
        _layer_load_s(speeds, work)
        - probed / work.num_layers
        - _layer_s(speeds, work.fresh, work.fresh * work.fresh_keys)
    )
    each = speeds.row_s + work.inexact_keys * speeds.pair_s
    if work.corrected:  # each row is recomputed or corrected
        room, each = room - work.inexact * speeds.moved_s, each - speeds.moved_s
    if room <= 0:
        return 0.0
    return min(1.0, room / each / work.inexact) if each > 0 else 1.0


def estimate(speeds: Speeds, work: Workload, ratio: float) -> Estimate:
    """Estimate a blended prefill. A layer starts when the previous one is computed and its own KV is loaded."""
    chosen, load = _chosen(work, ratio), _layer_load_s(speeds, work)
    checked = work.check_layer if 0 < chosen < work.inexact else 0  # at ratios 0 and 1 there is nothing to choose
    now, compute = _probe_s(speeds, work) if 0 < chosen < work.inexact else (0.0, 0.0)
    for layer in range(work.num_layers):
        seconds = _layer_s(speeds, *_rows(work, chosen, layer, checked))
        seconds += _moved_s(speeds, work, chosen) if layer > checked else 0.0
        now = max(now, _latency_s(work) + (layer + 1) * load) + seconds
        compute += seconds
    loaded = _latency_s(work) + work.num_layers * load
    return Estimate(now + speeds.head_s, compute + speeds.head_s, loaded, max(0.0, now - compute))


def estimate_full(speeds: Speeds, work: Workload) -> Estimate:
    """Estimate a full prefill, which loads nothing."""
    rows, pairs = _full_rows(work)
    last = _layer_s(speeds, work.kv_share * rows + (1 - work.kv_share), work.total)
    seconds = (work.num_layers - 1) * _layer_s(speeds, rows, pairs) + last + speeds.head_s
    return Estimate(seconds, seconds, 0.0, 0.0)


def learn(
    speeds: Speeds,
    predicted_s: float,
    computed_s: float,
    loaded: tuple[int, float],
    rest_s: float,
    is_measured: bool = True,
) -> Speeds:
    """Return the speeds updated with one more prefill, as running averages.

    predicted_s and computed_s: estimated and measured compute time; loaded: bytes of KV and seconds, 0 bytes if none
    was; rest_s: from the end of the prefill to the first token. is_measured: the first speeds were
    measured, which counts as one prefill. Otherwise the first prefill replaces them, and slower ones after it count
    little, since kernels are compiled and graphs captured in some of them.
    """
    share = max(_NEW, 1 / (speeds.prefills + 1 + is_measured))
    factor = (computed_s / predicted_s) if predicted_s > 0 and computed_s > 0 else 1.0
    if share < 1:
        share = _NEW if factor > 1 and not is_measured else share
        factor = min(_MOST, max(1 / _MOST, factor)) ** share  # limits the influence of one outlier
    bytes_per_s, (kv_bytes, load_s) = speeds.bytes_per_s, loaded
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


_NEW = 0.1  # weight of the newest prefill in a settled running average
_MOST = 4.0


def _chosen(work: Workload, ratio: float) -> int:
    return min(work.inexact, math.ceil(ratio * work.inexact - 1e-9))


def _layer_load_s(speeds: Speeds, work: Workload) -> float:
    local = work.kv_bytes / speeds.bytes_per_s
    if work.tier_bytes:  # tier KV is placed in the pool like other KV after it has arrived
        local = max(local, work.tier_bytes / work.tier_bytes_per_s)
    return local / work.num_layers


def _latency_s(work: Workload) -> float:
    return work.tier_latency_s if work.tier_bytes else 0.0


def _probe_s(speeds: Speeds, work: Workload) -> tuple[float, float]:
    """Return (time at which tokens are chosen, computing until then), seconds. A probe layer starts when its KV is
    loaded."""
    seconds, load = _layer_s(speeds, work.fresh, work.fresh * work.fresh_keys), _layer_load_s(speeds, work)
    now = 0.0
    for layer in range(work.probe_layers):
        now = max(now, _latency_s(work) + (layer + 1) * load) + seconds
    return now, work.probe_layers * seconds


def _layer_s(speeds: Speeds, rows: float, pairs: float) -> float:
    return speeds.layer_s + rows * speeds.row_s + pairs * speeds.pair_s


def _moved_s(speeds: Speeds, work: Workload, chosen: int) -> float:
    """Return the seconds a layer spends on correcting rows after the choice; 0 if nothing is recomputed, since there is
    nothing to learn from."""
    return speeds.moved_s * (work.inexact - chosen) if work.corrected and chosen else 0.0


def _full_rows(work: Workload) -> tuple[float, float]:
    return work.total, work.total * (work.total + 1) / 2


def _rows(work: Workload, chosen: int, layer: int, check: int = 0) -> tuple[float, float]:
    """Return (rows, pairs) of a layer, rows in units of one row's work. check: layer at which tokens are chosen, 0:
    before all."""
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
