"""AutoReport: prediction and outcome of `--ratio auto`, with the speeds and the workload that it was computed from (see
blend/cost.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class AutoReport:
    """Prediction and outcome of one prompt. The JSON form has seconds: predicted_ttft_s, ttft_s, and the prediction for
    a full prefill; a layer's recompute and load time, which are weighed against each other; the totals of computing and
    loading; and the speeds behind them."""

    decision: Decision
    speeds: Speeds
    work: Workload
    before_s: float  # seconds from the known question to the decision
    predicted_ttft_s: float
    predicted_full_ttft_s: float
    ttft_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        d, speeds = self.decision, self.speeds
        seconds = {
            "predicted_ttft_s": self.predicted_ttft_s,
            "ttft_s": self.ttft_s,
            "predicted_full_ttft_s": self.predicted_full_ttft_s,
            "layer_recompute_s": d.layer_compute_s,
            "layer_load_s": d.layer_load_s,
            "compute_s": d.chosen.compute_s,
            "load_s": d.chosen.load_s,
            "stall_s": d.chosen.stall_s,
        }
        return {
            "mode": d.mode,
            "ratio": round(d.ratio, 4),
            "floor": d.floor,
            **{name: None if value is None else round(value, 6) for name, value in seconds.items()},
            **({"tier_bytes": self.work.tier_bytes} if self.work.tier_bytes else {}),
            "load_bytes_per_s": None if math.isinf(speeds.bytes_per_s) else round(speeds.bytes_per_s),
            "layer_s": speeds.layer_s,
            "row_s": speeds.row_s,
            "pair_s": speeds.pair_s,
            "prefills_learnt_from": speeds.prefills,
        }
