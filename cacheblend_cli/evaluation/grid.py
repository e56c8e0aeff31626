"""The settings of a run: modes x selectors x ratios x contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cacheblend_cli.api import BlendConfig
from cacheblend_cli.evaluation.evaluate import FULL
from cacheblend_cli.evaluation.settings import Prefill, Setting


@dataclass(frozen=True)
class AutoRatio:
    """In the place of a ratio: a prefill that chooses it itself, `floor` at least."""

    prefill: Prefill
    floor: float

    def __format__(self, spec: str) -> str:
        return "auto"


def grid(
    blend: BlendConfig,
    *,
    modes: Sequence[str],
    selectors: Sequence[str],
    ratios: Sequence[float | AutoRatio],
    contexts: Sequence[str],
) -> list[Setting]:
    """Every combination once, labelled by what tells it apart; full prefill first, plain reuse next.

    blend: everything the combinations do not say. A selector that fixes the ratio (`all`, `none`) is taken once. Raises
    UsageError for a value that is none.
    """
    for mode in modes:
        replace(blend, mode=mode)  # checked there
    settings = [FULL]
    for context in dict.fromkeys(contexts):
        suffix = f", {context}" if len(set(contexts)) > 1 else ""
        if "reuse" in modes:
            settings.append(Setting("reuse" + suffix, replace(blend, mode="reuse"), context))
        for selector in dict.fromkeys(selectors if "blend" in modes else ()):
            fixed = selector in ("all", "none")
            for ratio in dict.fromkeys(ratios):
                auto = isinstance(ratio, AutoRatio)
                name = (selector if fixed else f"{selector} {ratio:g}") + suffix
                if name not in {s.label for s in settings} and not (auto and fixed):
                    least, way = (ratio.floor, ratio.prefill) if isinstance(ratio, AutoRatio) else (ratio, None)
                    config = replace(blend, mode="blend", selector=selector, ratio=least)
                    settings.append(Setting(name, config, context, way, auto))
    return settings
