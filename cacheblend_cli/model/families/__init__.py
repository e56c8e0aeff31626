"""Families of models: a file each. `read_spec` finds the one a config.json belongs to and reads it.

To add one: write its file (the fields of its transformers config class and what each is, and how the spec is read from
them), name it in FAMILIES, and put configurations of its models into tests/support/hub_models.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.model.checkpoint_files import refuse_other_formats
from cacheblend_cli.model.families.llama import LLAMA
from cacheblend_cli.model.families.mistral import MINISTRAL, MISTRAL
from cacheblend_cli.model.families.qwen2 import QWEN2
from cacheblend_cli.model.families.qwen3 import QWEN3
from cacheblend_cli.model.families.reader import ConfigFields, Family
from cacheblend_cli.model.families.refusals import check_weights, refuse_what_is_not_implemented
from cacheblend_cli.model.model_files import read_object
from cacheblend_cli.model.spec import ModelSpec

FAMILIES = {family.model_type: family for family in (LLAMA, MINISTRAL, MISTRAL, QWEN2, QWEN3)}


def read_spec(model_dir: Path) -> ModelSpec:
    """The spec of the checkpoint in `model_dir`. Raises NotFoundError without config.json, UsageError on what we do not know."""
    path = model_dir / "config.json"
    if not path.is_file():
        refuse_other_formats(model_dir)
        raise NotFoundError(
            f"{model_dir} has no config.json, so it is no model directory",
            "give --model a directory with config.json, tokenizer.json and *.safetensors, or a hub id",
        )
    return spec_from_config(read_object(path))


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """Translate a HF config. Raises UsageError, which names the field, on a family, a value or a field that is not
    implemented, and on a field that is missing or has the wrong type."""
    check_weights(config)
    family = family_of(config)
    refuse_what_is_not_implemented(config, family)
    return family.read(ConfigFields(config))


def family_of(config: dict[str, Any]) -> Family:
    """The family of a config: by `model_type`, as transformers' AutoModel, which `architectures` has to agree with."""
    model_type, names = config.get("model_type"), config.get("architectures")
    if names is None:
        names = []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"architectures in config.json is {names!r}, and has to be a list of names", "correct config.json"
        )
    known = f"known: model_type {', '.join(FAMILIES)}"
    if model_type is None:
        family = next((f for f in FAMILIES.values() if set(names) & set(f.architectures)), None)
        if family is None:
            raise UsageError(f"config.json has no model_type, and the architecture {_named(names)} is unknown", known)
        return family
    if model_type == "mistral" and "layer_types" in config:
        model_type = "ministral"  # as transformers' AutoConfig
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UsageError(f"unknown model_type {model_type!r} (architecture {_named(names)})", known)
    family = FAMILIES[model_type]
    if names and not set(names) & set(family.architectures):
        raise UsageError(
            f"unknown architecture {_named(names)} of model_type {model_type!r}",
            f"known: {', '.join(family.architectures)}",
        )
    return family


def _named(names: list[str]) -> str:
    return ", ".join(names) or "(none)"
