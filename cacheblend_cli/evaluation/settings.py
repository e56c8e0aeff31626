"""What is measured: a way to prefill, over chunks collected in one context."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from cacheblend_cli.api import BlendConfig
from cacheblend_cli.runtime.prefill import Prefilled
from cacheblend_cli.runtime.request import Request
from cacheblend_cli.runtime.runtime import Runtime


class Prefill(Protocol):
    """How a prompt's KV is filled: `cacheblend_cli.runtime.prefill.prefill`, or a variant of it under study."""

    def __call__(self, runtime: Runtime, request: Request, *, room: int = 0) -> Prefilled: ...


@dataclass(frozen=True)
class Setting:
    """label names it in tables and must be its own. context: how its chunks are collected, see corpus/contexts.py.

    prefill: None for the engine's own; a variant is told apart by the label alone. auto: it chooses the ratio itself, and
    blend.ratio is only its floor.
    """

    label: str
    blend: BlendConfig
    context: str = "sink"
    prefill: Prefill | None = field(default=None, compare=False, repr=False)
    auto: bool = False

    @property
    def is_full(self) -> bool:
        """Whether it is the reference itself."""
        return self.blend.mode == "full" and self.prefill is None

    @property
    def reuses(self) -> bool:
        """Whether it takes KV from the store."""
        return self.blend.mode != "full"

    def to_dict(self) -> dict[str, Any]:
        return {"label": self.label, "context": self.context, "auto": self.auto, **asdict(self.blend)}

    def digest(self, run: dict[str, Any]) -> str:
        """Names the setting within a run (model, dtype, answer length): 64 bits. The label tells variants apart only."""
        told: dict[str, Any] = {"context": self.context, "blend": asdict(self.blend), "run": run}
        if self.is_full:  # the same whatever blending is set to
            told = {"full": True, "run": run}
        if self.prefill is not None:
            told["label"] = self.label
        return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).hexdigest()
