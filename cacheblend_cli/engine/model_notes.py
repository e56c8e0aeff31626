"""Notes that an answer carries because of its model: what `models check` found, what generation_config.json asks for."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cacheblend_cli import user_cache
from cacheblend_cli.engine.sampling import model_sampling
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.types import BlendParams, SamplingParams

FORMAT = 2  # of the check: one more where it measures, or blending computes, otherwise
DEFAULT = BlendParams()


@dataclass(frozen=True)
class BlendVerdict:
    """ratio: the smallest at which `models check` found blending with the default selector close to a full prefill; None: none
    of those it tried."""

    ratio: float | None

    def __str__(self) -> str:
        """Return the note as the command line prints it."""
        if self.ratio is None:
            return "use --mode full"
        return "blend is safe" if self.ratio <= DEFAULT.ratio else f"blend needs --ratio {self.ratio:g}"

    def allows(self, blend: BlendParams) -> bool:
        """Return whether this way to blend is one that was found close to a full prefill, or was not measured."""
        default = (blend.selector, blend.correction) == (DEFAULT.selector, DEFAULT.correction)
        if blend.mode != "blend" or not default or self.ratio == DEFAULT.ratio:  # of smaller ratios nothing is known
            return True
        return self.ratio is not None and blend.effective_ratio() >= self.ratio


def keep_verdict(model: LoadedModel, verdict: BlendVerdict) -> None:
    """Remember it in the user's cache, for the model in every compute dtype."""
    user_cache.keep(_place(model), json.dumps(asdict(verdict)))


def known_verdict(model: LoadedModel) -> BlendVerdict | None:
    """The verdict of the last check; None for a model that was not checked on this machine."""
    with suppress(ValueError, TypeError):
        return BlendVerdict(**json.loads(user_cache.recall(_place(model))))
    return None


def model_notes(model: LoadedModel, blend: BlendParams, sampling: SamplingParams, num_chunks: int) -> list[str]:
    """Notes for an answer over num_chunks stored chunks. One chunk is exact: nothing of it is blended."""
    notes = []
    verdict = known_verdict(model) if num_chunks > 1 else None
    if verdict is not None and not verdict.allows(blend):
        needed = "use mode full" if verdict.ratio is None else f"it needs a ratio of {verdict.ratio:g}"
        notes.append(f"models check found blending with {model.name} to be far from a full prefill: {needed}")
    penalty = _greedy_penalty(model)
    if sampling.temperature == 0 and sampling.repetition_penalty == 1 and penalty not in (None, 1):
        notes.append(
            f"generation_config.json of {model.name} has repetition_penalty {penalty:g}, which transformers applies and this answer "
            f"does not: set repetition_penalty to {penalty:g} for that"
        )
    return notes


def _greedy_penalty(model: LoadedModel) -> float | None:
    """The repetition penalty of greedy decoding in transformers; None where generation_config.json names none that is one."""
    with suppress(UsageError):
        return model_sampling(model).get("repetition_penalty")
    return None


def _place(model: LoadedModel) -> Path:
    return user_cache.place("blending", FORMAT, model.fingerprints["float32"])
