"""Model families. `read_spec` finds the family of a config.json and reads it.

To add one: write the fields of its transformers config class, their defaults, and how to read the spec from them, in
the FAMILIES of a file, and add configurations of its models to tests/support/hub_models.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.model.families import deepseek, gemma, llama, moe, qwen
from cacheblend_cli.model.families.reader import Family
from cacheblend_cli.model.families.refusals import HYBRIDS, check_weights, refuse_what_is_not_implemented
from cacheblend_cli.model.families.values import shown
from cacheblend_cli.model.families.wrappers import EYES, WRAPPERS, Wrapper
from cacheblend_cli.model.model_files import (
    AGAIN,
    gguf_file_of,
    is_converted,
    is_there,
    read_object,
    refuse_other_formats,
    weight_names,
)
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.weight_map import num_parameters

MOST_PARAMETERS_PER_BYTE = 8
"""The densest quantisations of GGUF files have 5."""
FAMILIES = {f.model_type: f for file in (llama, qwen, gemma, moe, deepseek) for f in file.FAMILIES}


def read_spec(model_dir: Path) -> ModelSpec:
    """Return the spec of the checkpoint in `model_dir`. Raises NotFoundError without config.json, UsageError for
    anything unknown in it, and for a model that is too large for its weight files, if they are there."""
    path = model_dir / "config.json"
    if not is_there(path):
        refuse_other_formats(model_dir)
        raise NotFoundError(
            f"{model_dir} has no config.json, so it is not a model directory",
            "give --model a directory with config.json, tokenizer.json and *.safetensors, or a hub id",
        )
    spec = spec_from_config(read_object(path))
    names = weight_names(model_dir)
    files = [gguf_file_of(model_dir)] if is_converted(model_dir) else [model_dir / name for name in names]
    if files and all(map(is_there, files)):
        _check_size(spec, sum(file.stat().st_size for file in files))
    return spec


def _check_size(spec: ModelSpec, size: int) -> None:
    """Raise UsageError if weights of `size` bytes cannot hold the model, before anything of that size is allocated."""
    if spec.generic:  # at least an embedding, the queries of a layer, and a matrix of an MLP
        count = spec.hidden_size * (spec.vocab_size + spec.num_heads * spec.head_dim + spec.intermediate_size)
    else:
        count = num_parameters(spec)
    if count > size * MOST_PARAMETERS_PER_BYTE:
        names = "num_layers hidden_size intermediate_size num_heads num_kv_heads head_dim vocab_size".split()
        shape = ", ".join(f"{name} {getattr(spec, name):,}" for name in names)
        raise UsageError(
            f"config.json describes a model of {count:,} parameters ({shape}), but its weights have {size:,} bytes",
            AGAIN,
        )


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """Translate a HF config. Raises UsageError, naming the field, for a family, value or field that is not implemented,
    and for a field that is missing or has the wrong type."""
    model_type = config.get("model_type")
    name = model_type if isinstance(model_type, str) else ""
    ours = FAMILIES.get(name) or WRAPPERS.get(name)
    check_weights(config, ours.architectures if ours else (HYBRIDS.get(name, ""),))
    if isinstance(ours, Wrapper):
        return _inner_spec(ours, config)
    if name and ours is None:
        from cacheblend_cli.model.families.generic import generic_spec

        if (generic := generic_spec(config, _architectures(config))) is not None:  # imports transformers
            return generic
    family = family_of(config)
    refuse_what_is_not_implemented(config, family)
    spec = family.spec(config)
    if spec.max_context < 1:
        raise UsageError(
            f"RoPE's scaling in config.json leaves no context at all: {shown(spec.rope)}",
            "its factor and original_max_position_embeddings must give a context of at least one token",
        )
    return spec


def _inner_spec(wrapper: Wrapper, config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a language model inside another model."""
    _check_architectures(config, wrapper)
    if config.get("text_config") is not None:
        refuse_what_is_not_implemented(config, wrapper)
    inner = wrapper.text_config(config)
    spec = spec_from_config(inner)
    return replace(spec, architecture=wrapper.architectures[0], other_parts=spec.other_parts + EYES)


def family_of(config: dict[str, Any]) -> Family:
    """Return the family of a config by `model_type`, as transformers' AutoModel does. `architectures` must agree."""
    model_type, names = config.get("model_type"), _architectures(config)
    known = f"known: model_type {', '.join(sorted({*FAMILIES, *WRAPPERS}))}"
    if model_type == "mistral" and "layer_types" in config:
        model_type = "ministral"  # as in transformers' AutoConfig
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UsageError(f"unknown model_type {model_type!r} (architecture {_named(names)})", known)
    family = FAMILIES[model_type]
    _check_architectures(config, family)
    return family


def _check_architectures(config: dict[str, Any], family: Family | Wrapper) -> None:
    names = _architectures(config)
    if names and not set(names) & set(family.architectures):
        raise UsageError(
            f"unknown architecture {_named(names)} of model_type {family.model_type!r}",
            f"known: {', '.join(family.architectures)}",
        )


def _architectures(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures")
    if names is None:
        names = []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"architectures in config.json must be a list of names, not {names!r}", "correct config.json")
    return names


def _named(names: list[str]) -> str:
    return ", ".join(names) or "(none)"
