"""Sampling settings from a model's generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.description import Loaded
from cacheblend_cli.types import MODEL_SAMPLED, SamplingParams


def as_the_model(sampling: SamplingParams, fields: Collection[str], model: Loaded) -> SamplingParams:
    """Return the sampling with these fields from the model's generation_config.json, where it has them. Raises
    UsageError for a value that is not valid."""
    if not fields:
        return sampling
    named = model_sampling(model)
    try:
        return SamplingParams(**vars(sampling) | {field: named[field] for field in named.keys() & set(fields)})
    except UsageError as error:
        raise UsageError(
            f"generation_config.json of {model.name} is not valid: {error.message}", "leave --model-sampling out"
        ) from error


def model_sampling(model: Loaded) -> dict[str, Any]:
    """Return the fields of SamplingParams that generation_config.json sets. As in transformers, decoding is greedy
    without do_sample, and only the repetition penalty counts; with it the default temperature is 1."""
    config = model.generation_config
    sampled = config.get("do_sample") is True
    fields = MODEL_SAMPLED if sampled else ("repetition_penalty",)
    found = {field: _number(model, config, field) for field in fields if config.get(field) is not None}
    return {"temperature": 1.0, **found} if sampled else found


def _number(model: Loaded, config: Mapping[str, Any], field: str) -> int | float:
    value = config[field]
    wanted = (int,) if field == "top_k" else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted) or not math.isfinite(value):
        raise UsageError(
            f"{field} in generation_config.json of {model.name} is {value!r}, which is not a number",
            "correct the file, or leave --model-sampling out",
        )
    return value


def model_notes(model: Loaded, sampling: SamplingParams) -> list[str]:
    """Return notes on settings of generation_config.json that an answer does not use."""
    penalty = None
    with suppress(UsageError):  # an invalid value is not used either
        penalty = model_sampling(model).get("repetition_penalty")
    if sampling.temperature != 0 or sampling.repetition_penalty != 1 or penalty in (None, 1):
        return []
    return [
        f"generation_config.json of {model.name} has repetition_penalty {penalty:g}, which this answer does not use: to use it "
        f"as transformers does, set repetition_penalty to {penalty:g}"
    ]
