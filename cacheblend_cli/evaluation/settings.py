"""Settings of a measurement: a way to prefill, over chunks collected in one context."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from cacheblend_cli.corpus.search import CONTEXTS
from cacheblend_cli.errors import check_known
from cacheblend_cli.types import BlendParams
from cacheblend_cli.types.blend import parse_selector

if TYPE_CHECKING:
    from cacheblend_cli.engine.engine import Engine, Prefilled, Request


class Prefill(Protocol):
    """Fills a prompt's KV: `Engine.hold_prefill`, or a variant of it."""

    def __call__(self, engine: Engine, request: Request, /, *, headroom: int = 0) -> Prefilled: ...


@dataclass(frozen=True)
class Setting:
    label: str  # name in tables, unique in a run
    blend: BlendParams
    context: str = "sink"  # how chunks are collected, see corpus/contexts.py
    # None for the engine's own; variants are distinguished by label only
    prefill: Prefill | None = field(default=None, compare=False, repr=False)
    auto: bool = False  # --ratio auto chooses the ratio, at least blend.ratio

    @property
    def is_full(self) -> bool:
        return self.blend.mode == "full" and self.prefill is None

    @property
    def reuses(self) -> bool:
        return self.blend.mode != "full"

    def to_dict(self) -> dict[str, Any]:
        return {"label": self.label, "context": self.context, "auto": self.auto, **asdict(self.blend)}

    def digest(self, run: dict[str, Any]) -> str:
        """Return a 64-bit digest of the setting within a run (model, dtype, answer length). The label distinguishes
        variants only."""
        identity: dict[str, Any] = {"context": self.context, "blend": asdict(self.blend), "run": run}
        if self.is_full:  # independent of blending options
            identity = {"full": True, "run": run}
        if self.prefill is not None or self.auto:
            identity["label"] = self.label
        return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()


FULL = Setting("full prefill", BlendParams(mode="full"))


def grid(
    blend: BlendParams,
    *,
    modes: Sequence[str],
    selectors: Sequence[str],
    ratios: Sequence[float | str],
    contexts: Sequence[str],
) -> list[Setting]:
    """Return every combination once, labelled by its differences; full prefill first, plain reuse next.

    blend: all other options. ratios: numbers, or "auto" for --ratio auto with blend's ratio as the minimum.
    Selectors with a fixed ratio (`all`, `none`) appear once. Raises UsageError for invalid values.
    """
    for selector in selectors:
        parse_selector(selector)
    for context in contexts:
        check_known("context", context, CONTEXTS)
    for mode in modes:
        replace(blend, mode=mode)  # raises for an unknown mode
    settings = [FULL]
    for context in dict.fromkeys(contexts):
        suffix = f", {context}" if len(set(contexts)) > 1 else ""
        if "reuse" in modes:
            settings.append(Setting("reuse" + suffix, replace(blend, mode="reuse"), context))
        for selector in dict.fromkeys(selectors if "blend" in modes else ()):
            fixed = selector in ("all", "none")
            for ratio in dict.fromkeys(ratios):
                auto, least = (True, blend.ratio) if isinstance(ratio, str) else (False, ratio)
                name = (selector if fixed else f"{selector} {ratio}" if auto else f"{selector} {ratio:g}") + suffix
                if name not in {s.label for s in settings} and not (auto and fixed):
                    config = replace(blend, mode="blend", selector=selector, ratio=least)
                    settings.append(Setting(name, config, context, auto=auto))
    return settings
