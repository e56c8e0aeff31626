"""Notes that an answer carries because of its model: what generation_config.json asks for."""

from __future__ import annotations

from contextlib import suppress

from cacheblend_cli.engine.sampling import model_sampling
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.types import SamplingParams


def model_notes(model: LoadedModel, sampling: SamplingParams) -> list[str]:
    """Return the notes for an answer."""
    notes = []
    penalty = _greedy_penalty(model)
    if sampling.temperature == 0 and sampling.repetition_penalty == 1 and penalty not in (None, 1):
        notes.append(
            f"generation_config.json of {model.name} has repetition_penalty {penalty:g}, which transformers applies and this answer "
            f"does not: set repetition_penalty to {penalty:g} for that"
        )
    return notes


def _greedy_penalty(model: LoadedModel) -> float | None:
    """The repetition penalty of greedy decoding in transformers; None where generation_config.json names none that is
    one."""
    with suppress(UsageError):
        return model_sampling(model).get("repetition_penalty")
    return None
