"""How a model's makers sample from it: what its generation_config.json says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.runtime.sampling import SamplingParams
from cacheblend_cli.settings import Resolved, of_settings

_SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "sample_top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
"""Field -> the setting it is the default of."""


def sampling_of(resolved: Resolved, **others: Any) -> SamplingParams:
    """How the settings sample, where they leave nothing to the model. Raises UsageError."""
    return of_settings(SamplingParams, resolved.settings, top_k=resolved.settings.sample_top_k, **others)


def as_the_model(sampling: SamplingParams, resolved: Resolved, model: LoadedModel) -> SamplingParams:
    """With --model-sampling, what no flag, variable or file sets is as the model's generation_config.json has it.

    Raises UsageError for a field that makes no sense.
    """
    if not resolved.settings.model_sampling:
        return sampling
    named = model_sampling(model)
    unset = {field for field, setting in _SETTINGS.items() if resolved.origin[setting] == "default"}
    try:
        return SamplingParams(**vars(sampling) | {field: named[field] for field in named.keys() & unset})
    except UsageError as error:
        raise UsageError(
            f"generation_config.json of {model.name} cannot be followed: {error.message}", "leave --model-sampling out"
        ) from error


def model_sampling(model: LoadedModel) -> dict[str, Any]:
    """Fields of SamplingParams that generation_config.json names. Without do_sample it is greedy, as with transformers: then
    only its repetition penalty counts, and a temperature is 1 with it where none is named."""
    config = model.generation_config
    sampled = config.get("do_sample") is True
    fields = _SETTINGS if sampled else ("repetition_penalty",)
    found = {field: _number(model, config, field) for field in fields if config.get(field) is not None}
    return {"temperature": 1.0, **found} if sampled else found


def _number(model: LoadedModel, config: Mapping[str, Any], field: str) -> int | float:
    value = config[field]
    wanted = (int,) if field == "top_k" else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted) or not math.isfinite(value):
        raise UsageError(
            f"{field} in generation_config.json of {model.name} is {value!r}, and has to be a number",
            "correct it, or leave --model-sampling out",
        )
    return value
