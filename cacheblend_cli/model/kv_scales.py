"""Scales of float8 K and V in a checkpoint, as calibrated by quantisation tools for other engines' caches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.quantisation import FIELD
from cacheblend_cli.model.model_files import checkpoint_files, is_converted
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.tensor_source import SafetensorsFiles

_NAMES = re.compile(
    r"\.(?P<layer>\d+)\.\w*att(?:n|ention)\.(?:attn\.|qkv_proj\.)?"
    r"(?:(?P<part>k|v|kv)_scale|(?P<proj>[kv])_proj\.(?:[kv]_scale|output_scale)|(?:q|prob)_scale|[qkv]_zero_point)$"
)
"""compressed-tensors: self_attn.k_scale; ModelOpt: self_attn.k_proj.k_scale; AutoFP8: self_attn.k_proj.output_scale, or
self_attn.kv_scale for both. Scales of queries and softmax, and zero points of integers, are not used."""
FLOAT8 = ("float", 8)


@dataclass(frozen=True)
class KVScales:
    """Scales of a float8 pool. The pool holds float8_e4m3fn codes: K (rotated) and V divided by the scales."""

    k: tuple[Tensor, ...]  # per layer [num_kv_heads] fp32
    v: tuple[Tensor, ...]  # per layer [num_kv_heads] fp32


def is_kv_scale(name: str) -> bool:
    """Return whether the tensor is a scale or zero point of K and V. Weights do not depend on it."""
    return _NAMES.search(name) is not None


def checkpoint_scales(spec: ModelSpec, model_dir: Path, device: torch.device) -> KVScales | None:
    """Read the scales of every layer's K (rotated) and V, one per head or one for all: values are codes times scale.

    None without scales, or if they are for integers or a latent. Raises UsageError if some are missing or not positive.
    """
    scheme = (spec.config.get(FIELD) or {}).get("kv_cache_scheme")
    of_integers = isinstance(scheme, dict) and (scheme.get("type", "float"), scheme.get("num_bits", 8)) != FLOAT8
    if of_integers or spec.latent is not None or is_converted(model_dir):
        return None
    files, found = SafetensorsFiles(checkpoint_files(model_dir)), dict[tuple[int, str], str]()
    for name, _, _ in files.headers():
        if match := _NAMES.search(name):
            for part in match["part"] or match["proj"] or "":
                found[int(match["layer"]), part] = name
    if not found:
        return None
    own = [layer for layer in range(spec.num_layers) if spec.kv_layer(layer) == layer]
    missing = [f"{part}_scale of layer {layer}" for layer in own for part in "kv" if (layer, part) not in found]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UsageError(
            f"{model_dir} has {len(found)} scales of float8 KV, and lacks {', '.join(missing[:3])}{more}",
            "fetch the checkpoint again, or leave --kv-pool-dtype at auto, which needs no scales",
        )
    k, v = (tuple(_scale(files, found[layer, part], spec.heads_of(layer)[0]) for layer in own) for part in "kv")
    return KVScales(tuple(s.to(device) for s in k), tuple(s.to(device) for s in v))


def _scale(files: SafetensorsFiles, name: str, num_kv_heads: int) -> Tensor:
    """Return the scale, [num_kv_heads] fp32."""
    scale = files.whole(name).float().flatten()
    if scale.numel() not in (1, num_kv_heads) or not bool((scale.isfinite() & (scale > 0)).all()):
        raise UsageError(
            f"{name}: expected 1 or {num_kv_heads} positive scales, got {scale.tolist()[:4]}",
            "leave --kv-pool-dtype at auto, which needs no scales",
        )
    return scale.expand(num_kv_heads).clone()
