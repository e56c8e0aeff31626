"""Blending: how stored KV is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cacheblend_cli import extensions
from cacheblend_cli.errors import UsageError, check_known
from cacheblend_cli.settings import Settings, of_settings

MODES = ("blend", "full", "reuse")
DEVIATIONS = ("v", "k", "kv")
SELECTORS: dict[str, str | Callable[[int], Any]] = {
    "hkvd": "HighestDeviation",
    "first": "FirstOfChunk",
    "query": "QueryAttention",
    "random": "RandomTokens",
    "all": "FirstOfChunk",  # any selector, at ratio 1
    "none": "FirstOfChunk",  # any selector, at ratio 0
}
"""Class in blend/selectors.py by name, known without importing torch; or what makes a selector from a seed."""
_DIGITS = 9  # maximum digits of COUNT


@dataclass(frozen=True)
class BlendParams:
    """Use of stored KV. Names of selectors and corrections, and layers, are checked against the model, see
    blend/policy.py: policy_of."""

    mode: str = "blend"  # one of MODES
    ratio: float = 0.15  # share of the reusable, inexact tokens to recompute; with --ratio auto at least this one
    selector: str = "query"
    deviation: str = "k"
    check_layer: int = 1
    block: int = 1
    seed: int = 0
    checks: tuple[tuple[int, float], ...] = ()  # (layer, ratio), in place of ratio and check_layer (gradual filtering)
    probe_layers: tuple[int, int] | None = None  # first and last layer that `query` observes, None for the middle half
    correction: str = "regression"  # of KV that is not recomputed, see blend/corrections.py, or "none"

    def __post_init__(self) -> None:
        check_known("mode", self.mode, MODES)
        check_known("deviation", self.deviation, DEVIATIONS)
        for _, ratio in self.checks or ((self.check_layer, self.ratio),):
            if not 0 <= ratio <= 1:
                raise UsageError(f"--ratio {ratio} is not between 0 and 1", "0.15 recomputes 15 % of the tokens")
        if not 1 <= self.block < 2**63:
            raise UsageError(
                f"block {self.block} is not 1 or more, or too large", "1, the default, chooses single tokens"
            )
        layers, ratios = [c[0] for c in self.checks], [c[1] for c in self.checks]
        if layers != sorted(set(layers)) or ratios != sorted(ratios, reverse=True):
            raise UsageError("check layers must rise and their ratios fall", "for example 1:0.3,4:0.15")

    @classmethod
    def of(cls, settings: Settings) -> BlendParams:
        """Return the settings' blending; with --ratio auto, at the lower bound of the ratio; with --ratio model, at the
        ratio for a model without a profile. Raises UsageError."""
        parse_selector(settings.selector)
        ratio = cls.ratio if isinstance(settings.ratio, str) else settings.ratio
        return of_settings(cls, settings, ratio=ratio, seed=settings.seed or 0)

    def effective_ratio(self) -> float:
        """Ratio of the last check, which holds in most layers."""
        if self.mode == "full" or self.selector == "all":
            return 1.0
        if self.mode == "reuse" or self.selector == "none":
            return 0.0
        return self.checks[-1][1] if self.checks else self.ratio


def parse_selector(text: str) -> tuple[list[tuple[str, int]], str]:
    """Parse "first:4+query" into ([(first, 4)], query). Raises UsageError, also for names that are not known."""
    *heads, last = text.split("+")
    parts = []
    for head in heads:
        name, _, count = head.partition(":")
        if not count.isdecimal() or len(count) > _DIGITS or name in ("all", "none"):
            raise UsageError(f"{head!r} in the selector {text!r} is not NAME:COUNT", "for example first:4+query")
        parts.append((name, int(count)))
    if parts and last in ("all", "none"):
        raise UsageError(f"{last!r} combines with nothing", "for example first:4+query")
    for name in (*(name for name, _ in parts), last):
        if name not in SELECTORS and name not in (own := [point.name for point in extensions.installed("selector")]):
            known = ", ".join((*SELECTORS, *own))
            raise UsageError(f"unknown selector {name!r}", f"known: {known}; combined as first:4+query")
    return parts, last
