"""RoPE's parameters from config.json, in all the ways it has been written, as transformers reads them."""

from __future__ import annotations

from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.values import is_number, shown, wrong_value

# The types of transformers that rotate the whole head, and what each cannot do without.
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
WITH_ORIGINAL = ("yarn", "longrope", "llama3")
NUMBERS = (
    "rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale",
    "mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor",
)  # fmt: skip
FACTORS = ("short_factor", "long_factor")  # a number for each pair of dimensions
OTHERS = ("rope_type", "type", "truncate", "finetuned")
MAY_BE_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # 0: not given
THETA = 10000.0


def rope_parameters(config: dict[str, Any], max_positions: int, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 has it after it has read a config (`convert_rope_params_to_dict` and
    `standardize_rope_params` of its RotaryEmbeddingConfigMixin): `rope_type` and `rope_theta` always, and the original
    length for the types that have one. Raises UsageError, which names the field.
    """
    parameters = _chosen(config)
    if "type" in parameters:
        parameters.setdefault("rope_type", parameters.pop("type"))
    rope_type = parameters.setdefault("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in NEEDED:
        raise UsageError(f"unknown RoPE type {shown(rope_type)}", f"known: {', '.join(NEEDED)}")
    parameters.setdefault("rope_theta", config.get("rope_theta", THETA))
    _check_values(parameters, head_dim)
    if rope_type in WITH_ORIGINAL:
        original = config.get("original_max_position_embeddings")  # beside them it counts for more than in them
        original = original or parameters.get("original_max_position_embeddings") or max_positions
        parameters["original_max_position_embeddings"] = _number("original_max_position_embeddings", original)
    null_counts = rope_type == "yarn"  # its factor may be null: the ratio of the two lengths
    lacking = [n for n in NEEDED[rope_type] if n not in parameters or (parameters[n] is None and not null_counts)]
    if lacking:
        raise UsageError(
            f"rope_parameters of type {rope_type!r} are incomplete: they lack {', '.join(lacking)}", "check config.json"
        )
    for where in (parameters, config):
        partial = where.get("partial_rotary_factor")
        if partial not in (None, 1):
            raise UsageError(
                f"partial_rotary_factor in config.json is {shown(partial)}: RoPE over a part of the head is not implemented",
                "only models that rotate the whole head are known",
            )
    return parameters


def _chosen(config: dict[str, Any]) -> dict[str, Any]:
    """The one of the two fields that counts: `rope_scaling`, where both are there."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name), dict | None):
            raise wrong_value(name, config[name], "an object or null")
    scaling, parameters = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if not scaling:
        return dict(parameters)
    taken = scaling.get("rope_theta", config.get("rope_theta", THETA))
    lost = parameters.get("rope_theta", taken)
    if lost != taken:
        raise UsageError(
            f"rope_scaling in config.json takes the place of rope_parameters, and their rope_theta {lost} would be lost",
            f'write "rope_theta": {lost} into rope_scaling too, or the scaling into rope_parameters',
        )
    return dict(scaling)


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
                raise wrong_value(name, value, f"a list of {head_dim // 2} numbers, one for two dimensions of a head")
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
