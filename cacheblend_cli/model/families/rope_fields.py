"""RoPE's parameters from config.json in all formats that transformers reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.values import is_number, shown, wrong_value

# RoPE types of transformers, and their required parameters.
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
WITH_ORIGINAL = ("yarn", "longrope", "llama3")
NUMBERS = (
    "rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale",
    "mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor",
)  # fmt: skip
FACTORS = ("short_factor", "long_factor")  # one number per pair of dimensions
OTHERS = ("rope_type", "type", "truncate", "finetuned")
MAY_BE_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # 0 means not given
THETA = 10000.0
KINDS = ("full_attention", "sliding_attention")


def rope_parameters(
    config: Mapping[str, Any], max_positions: int, head_dim: int, missing: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Return `rope_parameters` as transformers 5 has it after reading a config (`convert_rope_params_to_dict` and
    `standardize_rope_params` of its RotaryEmbeddingConfigMixin): always with `rope_type` and `rope_theta`, and with the
    original length for the types that have one. Raises UsageError naming the field.

    missing: the family's default of rope_theta and, if it can rotate a part of the head, of partial_rotary_factor.
    """
    parameters = dict(_object(config, "rope_scaling") or _object(config, "rope_parameters"))
    if "type" in parameters:
        parameters.setdefault("rope_type", parameters.pop("type"))
    rope_type = parameters.setdefault("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in NEEDED:
        raise UsageError(f"unknown RoPE type {shown(rope_type)}", f"known: {', '.join(NEEDED)}")
    parameters.setdefault("rope_theta", config.get("rope_theta", missing.get("rope_theta", THETA)))
    rotated = _set_partial(parameters, config, head_dim, missing.get("partial_rotary_factor"))
    _check_values(parameters, rotated)
    if rope_type in WITH_ORIGINAL:
        original = config.get("original_max_position_embeddings")  # takes precedence over the one in rope_parameters
        original = original or parameters.get("original_max_position_embeddings") or max_positions
        parameters["original_max_position_embeddings"] = _number("original_max_position_embeddings", original)
    null_counts = rope_type == "yarn"  # yarn's factor may be null: the ratio of the two lengths
    lacking = [n for n in NEEDED[rope_type] if n not in parameters or (parameters[n] is None and not null_counts)]
    if lacking:
        raise UsageError(
            f"rope_parameters of type {rope_type!r} are incomplete: they lack {', '.join(lacking)}", "check config.json"
        )
    return parameters


def rope_by_kind(
    config: Mapping[str, Any], max_positions: int, head_dim: int, full: float, local: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return RoPE's parameters of layers without and with a window, for families whose config gives them by kind of
    layer, or in the older way: rope_theta and rope_scaling for layers without, rope_local_base_freq for layers with a
    window. full, local: the family's default thetas."""
    given = _object(config, "rope_parameters")
    if not set(given) <= set(KINDS):
        raise UsageError(
            f"rope_parameters in config.json have {shown(sorted(set(given) - set(KINDS))[0])}, but this family needs them "
            f"by kind of layer",
            f"write them as {{{', '.join(KINDS)}}}, each with its own parameters",
        )
    found = []
    for kind, theta, named in zip(KINDS, (full, local), ("rope_theta", "rope_local_base_freq"), strict=True):
        one = {"rope_theta": config.get(named, theta)} | _object(given, kind)
        if kind == KINDS[0]:
            one |= _object(config, "rope_scaling")
        found.append(rope_parameters({"rope_parameters": one}, max_positions, head_dim))
    return found[0], found[1]


def _set_partial(parameters: dict[str, Any], config: Mapping[str, Any], head_dim: int, default: float | None) -> int:
    """Return the number of channels of a head that RoPE covers, and store a partial factor in the parameters.
    Proportional RoPE always covers the whole head: its factor is the share of frequencies that are not 0. default: None
    for a family that always rotates the whole head."""
    if parameters["rope_type"] == "proportional":
        if (share := config.get("partial_rotary_factor")) is not None:
            parameters.setdefault("partial_rotary_factor", share)
        if _number("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0)) > 1:
            raise wrong_value("partial_rotary_factor", parameters["partial_rotary_factor"], "at most 1")
        return head_dim
    if default is None:
        for where in (parameters, config):
            partial = where.get("partial_rotary_factor")
            if partial not in (None, 1):
                raise UsageError(
                    f"partial_rotary_factor in config.json is {shown(partial)}: RoPE over a part of the head is not "
                    "implemented for this family",
                    "only models that rotate the whole head are known",
                )
        return head_dim
    partial = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor", default))
    rotated = int(head_dim * _number("partial_rotary_factor", partial))
    if partial > 1 or rotated % 2 or not rotated:
        raise wrong_value("partial_rotary_factor", partial, f"a share of {head_dim} channels that gives an even number")
    if rotated != head_dim:
        parameters["partial_rotary_factor"] = partial
    return rotated


def _object(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the field's object, an empty one for null."""
    found = values.get(name)
    if not isinstance(found, dict | None):
        raise wrong_value(name, found, "an object or null")
    return found or {}


def _check_values(parameters: dict[str, Any], head_dim: int) -> None:
    for name, value in parameters.items():
        if isinstance(value, dict):
            raise UsageError(
                f"rope_parameters in config.json are given by kind of layer ({name}), which is not implemented",
                "only models with one RoPE for all layers are known",
            )
        if name in NUMBERS:
            if value is not None or name == "rope_theta":
                _number(name, value)
        elif name in FACTORS:
            if not isinstance(value, list) or len(value) != head_dim // 2:
                raise wrong_value(
                    name, value, f"a list of {head_dim // 2} numbers, one per pair of dimensions of a head"
                )
            for entry in value:
                _number(name, entry)
        elif name not in OTHERS and value not in (None, False):
            raise UsageError(
                f"RoPE's parameters in config.json have {name}, which is not implemented",
                "use another model; or take the field out of config.json, if the model was made without it",
            )


def _number(name: str, value: Any) -> Any:
    if not is_number(value):
        raise wrong_value(name, value, "a number")
    if value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        raise wrong_value(name, value, "a number above 0")
    return value
