"""The settings of a run: modes x selectors x ratios x contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cacheblend_cli.api import BlendConfig
from cacheblend_cli.evaluation.evaluate import FULL, NOISE_FLOOR
from cacheblend_cli.evaluation.settings import Prefill, Setting


def grid(
    blend: BlendConfig,
    *,
    modes: Sequence[str],
    selectors: Sequence[str],
    ratios: Sequence[float],
    contexts: Sequence[str],
    noise_floor: bool = True,
    auto: Prefill | None = None,
    floor: float = 0.15,
) -> list[Setting]:
    """Every combination once, labelled by what tells it apart; full prefill first, plain reuse
    next, the noise floor last.

    blend: everything the combinations do not say. auto: a prefill that chooses the ratio itself, one setting more a
    selector, with `floor` as the least. A selector that fixes the ratio (`all`, `none`) is taken once.
    Raises UsageError for a value that is none.
    """
    for mode in modes:
        replace(blend, mode=mode)  # checked there
    settings = [FULL]
    for context in dict.fromkeys(contexts):
        suffix = f", {context}" if len(set(contexts)) > 1 else ""
        if "reuse" in modes:
            settings.append(Setting("reuse" + suffix, replace(blend, mode="reuse"), context))
        for selector in dict.fromkeys(selectors if "blend" in modes else ()):
            for ratio in dict.fromkeys(ratios):
                name = (selector if selector in ("all", "none") else f"{selector} {ratio:g}") + suffix
                if name not in {s.label for s in settings}:
                    config = replace(blend, mode="blend", selector=selector, ratio=ratio)
                    settings.append(Setting(name, config, context))
            if auto is not None and selector not in ("all", "none"):
                config = replace(blend, mode="blend", selector=selector, ratio=floor)
                settings.append(Setting(f"{selector} auto{suffix}", config, context, auto, auto=True))
    return [*settings, NOISE_FLOOR] if noise_floor else settings
