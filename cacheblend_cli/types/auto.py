"""AutoReport: prediction and outcome of `--ratio auto`, or of a full prefill that replaces a blended one on a GPU, with
the speeds and the workload that it was computed from (see blend/cost.py)."""

# no `from __future__ import annotations`: NotRequired needs evaluated annotations
import math
from dataclasses import dataclass
from typing import NotRequired, TypedDict


@dataclass(frozen=True)
class Speeds:
    """Measured speeds of a machine for a model."""

    layer_s: float  # seconds per layer, independent of rows
    row_s: float  # seconds per row and layer
    pair_s: float  # seconds per (row, key) pair and layer
    head_s: float  # seconds of the output head
    rest_s: float = 0.0  # seconds from the end of the prefill to the first token
    # KV from the store into the pool: read, checked and placed; inf until a prompt has loaded some
    bytes_per_s: float = math.inf
    prefills: int = 0  # number of prefills learnt from
    # number of latest prefills in a row that loaded nothing, so that nothing was learnt about loading
    not_loaded: int = 0
    moved_s: float = 0.0  # seconds per corrected row and layer


@dataclass(frozen=True)
class Workload:
    """Workload of one prompt."""

    num_layers: int
    total: int  # tokens
    inexact: int  # cached tokens whose KV needs repair
    inexact_keys: float  # mean number of keys that an inexact token sees
    fresh: int  # tokens computed in any case
    fresh_keys: float  # mean number of keys that a fresh token sees
    kv_bytes: int  # KV to load, all layers
    kv_share: float  # share of K and V in a row's work per layer
    check_layer: int = 1  # 0 for a selector without a check layer
    layer0_exact: bool = True  # stored K and V of layer 0 are exact
    probe_layers: int = 0  # number of first layers that fresh rows pass through before tokens are chosen
    corrected: bool = False  # KV that is not recomputed is corrected
    tier_bytes: int = 0  # part of kv_bytes that comes from a shared tier
    tier_bytes_per_s: float = math.inf
    tier_latency_s: float = 0.0  # seconds from the request to the first byte of the tier


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of a prefill. Computing and loading overlap."""

    prefill_s: float
    compute_s: float
    load_s: float
    stall_s: float  # time that computing waits for KV


@dataclass(frozen=True)
class Decision:
    """The controller's decision for a prompt."""

    mode: str  # "blend" at `ratio`, or "full" (ratio 1)
    ratio: float
    floor: float  # minimum ratio
    layer_compute_s: float  # compute time of a layer after the check layer, at `ratio`
    layer_load_s: float  # load time of a layer, which layer_compute_s is weighed against
    chosen: Estimate  # estimate for the decision
    full: Estimate  # estimate for a full prefill


class Auto(TypedDict):
    """Decision of `--ratio auto`, or for a full prefill that is faster on a GPU, and what came of it."""

    mode: str  # decision: blend at `ratio`, or a full prefill
    ratio: float  # share of the reused, inexact tokens that was recomputed
    floor: float  # lower bound of the ratio
    predicted_ttft_s: float  # predicted seconds to the first token
    ttft_s: float | None  # measured seconds to the first token
    predicted_full_ttft_s: float  # predicted seconds to the first token of a full prefill
    layer_recompute_s: float  # predicted seconds to recompute a layer
    layer_load_s: float  # predicted seconds to load a layer, which the one above is weighed against
    compute_s: float  # predicted seconds of computing, in all
    load_s: float  # predicted seconds of loading, in all
    stall_s: float  # predicted seconds in which computing waits for KV
    tier_bytes: NotRequired[int]  # bytes that come from a shared tier
    load_bytes_per_s: int | None  # speed of loading, null before the first measurement
    layer_s: float  # measured seconds per layer, whatever the number of rows
    row_s: float  # measured seconds per row and layer
    pair_s: float  # measured seconds per pair of row and key, and layer
    prefills_learnt_from: int  # number of prefills behind the speeds


@dataclass(frozen=True)
class AutoReport:
    """Prediction and outcome of one prompt."""

    decision: Decision
    speeds: Speeds
    work: Workload
    before_s: float  # seconds from the known question to the decision
    predicted_ttft_s: float
    predicted_full_ttft_s: float
    ttft_s: float | None = None

    def to_dict(self) -> Auto:
        """Return the JSON form."""
        d, speeds = self.decision, self.speeds
        found: Auto = {
            "mode": d.mode,
            "ratio": round(d.ratio, 4),
            "floor": d.floor,
            "predicted_ttft_s": round(self.predicted_ttft_s, 6),
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 6),
            "predicted_full_ttft_s": round(self.predicted_full_ttft_s, 6),
            "layer_recompute_s": round(d.layer_compute_s, 6),
            "layer_load_s": round(d.layer_load_s, 6),
            "compute_s": round(d.chosen.compute_s, 6),
            "load_s": round(d.chosen.load_s, 6),
            "stall_s": round(d.chosen.stall_s, 6),
            "load_bytes_per_s": None if math.isinf(speeds.bytes_per_s) else round(speeds.bytes_per_s),
            "layer_s": speeds.layer_s,
            "row_s": speeds.row_s,
            "pair_s": speeds.pair_s,
            "prefills_learnt_from": speeds.prefills,
        }
        if self.work.tier_bytes:
            found["tier_bytes"] = self.work.tier_bytes
        return found
