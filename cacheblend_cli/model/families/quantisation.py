"""Quantisation of a checkpoint from quantization_config in config.json: read, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.values import shown
from cacheblend_cli.model.model_files import read_object

FIELD = "quantization_config"
HINT = (
    "use the checkpoint it was made from, with --weight-dtype int8 or int4 to quantise it, or a GGUF file; "
    f"or take {FIELD} out of config.json, if the weights are not quantised"
)
FP8, INT8 = "F8_E4M3", "I8"  # safetensors' names


@dataclass(frozen=True)
class Quantisation:
    """Quantisation of a checkpoint's weights."""

    method: str  # "scaled" (8-bit or packed weights with scales), "gptq", "awq" or "mxfp4" (see `split_experts`)
    kind: str = INT8  # dtype of a scaled weight that is not packed
    packed: bool = False
    block: tuple[int, int] | None = None  # rows and columns that share a scale, if the scales are a grid
    bits: int = 8  # bits of a packed value
    zero_offset: int = 0  # added to a packed zero point
    group_size: int = -1  # number of inputs that share a scale, -1: all
    symmetric: bool = True  # by the config the zero point is the middle


def quantisation_of(model_dir: Path) -> Quantisation | None:
    """Return the quantisation method in a checkpoint's config.json; None if not quantised."""
    config = read_object(model_dir / "config.json")
    inner = config.get("text_config")
    return read_quantisation(config.get(FIELD) or (inner.get(FIELD) if isinstance(inner, dict) else None))


def read_quantisation(values: Any) -> Quantisation | None:
    """Return the quantisation, None if `values` is empty. Raises UsageError, with the reason, if not implemented."""
    if not values:
        return None
    method = values.get("quant_method") if isinstance(values, dict) else None
    if not isinstance(method, str) or method not in _METHODS:
        raise refused(FIELD, values, "which is not implemented")
    return _METHODS[method](values)


def refused(field: str, values: Any, reason: str) -> UsageError:
    method = values.get("quant_method") if isinstance(values, dict) else None
    named = method if isinstance(method, str) else shown(values)
    return UsageError(f"the weights are quantised: config.json has {field} ({named}), {reason}", HINT)


def _fp8(values: Mapping[str, Any]) -> Quantisation:
    _expect(values, "fmt", None, "e4m3")
    _expect(values, "activation_scheme", None, "dynamic", "static")
    _expect(values, "expert_dtype", None, "fp8")
    _expect(values, "modules_to_convert", None, [])
    block = values.get("weight_block_size", [128, 128])
    return Quantisation("scaled", FP8, block=None if block is None else _block(values, "weight_block_size", block))


def _compressed(values: Mapping[str, Any]) -> Quantisation:
    _expect(values, "transform_config", None, {})
    sparsity = values.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense"):
        raise refused(FIELD, values, "and its weights are sparse (sparsity_config), which is not implemented")
    groups = values.get("config_groups")
    if groups in (None, {}) and values.get("kv_cache_scheme"):  # only KV is quantised, and only in the engine
        return Quantisation("scaled", FP8)
    _expect(values, "format", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
    given = groups.values() if isinstance(groups, dict) else ()
    kinds = [group.get("weights") for group in given if isinstance(group, dict)]
    weights = next((kind for kind in kinds if isinstance(kind, dict)), None)
    if weights is None or any(kind != weights for kind in kinds):
        raise refused(FIELD, values, "and its config_groups do not quantise all weights in one way")
    packed = values["format"] == "pack-quantized"
    _expect(values, "type", *(("int",) if packed else ("int", "float")), within=weights)
    _expect(values, "num_bits", *((4, 8) if packed else (8,)), within=weights)
    _expect(values, "symmetric", None, True, False, within=weights)
    _expect(values, "strategy", "tensor", "channel", "group", "block", within=weights)
    _expect(values, "actorder", None, "weight", "static", within=weights)
    block = None
    if weights["strategy"] == "group":
        block = _block(values, "group_size", [1, weights.get("group_size")])
    elif weights["strategy"] == "block":
        block = _block(values, "block_structure", weights.get("block_structure"))
    kind, symmetric = FP8 if weights["type"] == "float" else INT8, weights.get("symmetric") is not False
    return Quantisation("scaled", kind, packed, block, weights["num_bits"], symmetric=symmetric)


def _gptq(values: Mapping[str, Any]) -> Quantisation:
    _expect(values, "bits", 4, 8)
    _expect(values, "checkpoint_format", None, "gptq", "gptq_v2")
    _expect(values, "is_marlin_format", None, False)
    _expect(values, "dynamic", None, {})
    offset = 0 if values.get("checkpoint_format") == "gptq_v2" else 1
    symmetric = values.get("sym") is True
    return Quantisation(
        "gptq", bits=values["bits"], zero_offset=offset, group_size=_group_size(values), symmetric=symmetric
    )


def _awq(values: Mapping[str, Any]) -> Quantisation:
    _expect(values, "bits", 4)
    _expect(values, "version", None, "gemm", "GEMM")
    _expect(values, "zero_point", None, True)
    return Quantisation("awq", bits=4, group_size=_group_size(values), symmetric=False)


_METHODS: dict[str, Callable[[Mapping[str, Any]], Quantisation]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": lambda values: Quantisation("mxfp4", bits=4, group_size=32),  # only gpt-oss's experts
}


def _expect(values: Mapping[str, Any], name: str, *known: Any, within: Mapping[str, Any] | None = None) -> None:
    found = (values if within is None else within).get(name)
    if not any(type(found) is type(value) and found == value for value in known):
        raise refused(FIELD, values, f"and its {name} = {shown(found)} is not implemented")


def _block(values: Mapping[str, Any], name: str, block: Any) -> tuple[int, int]:
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise refused(FIELD, values, f"and its {name} = {shown(block)} is not implemented")
    return block[0], block[1]


def _group_size(values: Mapping[str, Any]) -> int:
    size = values.get("group_size", 128)
    if type(size) is not int or (size < 1 and size != -1):
        raise refused(FIELD, values, f"and its group_size = {shown(size)} is not implemented")
    return size
