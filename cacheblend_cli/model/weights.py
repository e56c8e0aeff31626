"""Weights under our names: copied from where they are read once, into fused tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from platformdirs import user_cache_path
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.checkpoint_files import checkpoint_files
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.tensor_source import TensorSource, tensor_source

# HF name of a part -> (our fused tensor, rank of the part in it). As vLLM's stacked_params_mapping.
STACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Parts of the names of tensors that the language model does not compute with: RoPE's frequencies, and the heads of
# reward models.
NOT_THE_MODEL = ("rotary_emb.inv_freq", "v_head.", "value_head.")
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
QUANTISED = (
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_scale",
    ".weight_scale_inv",
    ".absmax",
    ".quant_map",
    ".SCB",
)


def load_weights(spec: ModelSpec, model_dir: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Every tensor of the model under our names, in `dtype` on `device`.

    Names: embed, norm, lm_head, and for layer i `i.qkv_proj.weight` [q + 2 kv, hidden], `i.o_proj.weight`,
    `i.gate_up_proj.weight` [2 * intermediate, hidden], `i.down_proj.weight`, `i.input_layernorm`,
    `i.post_attention_layernorm`, `i.q_norm`, `i.k_norm` and the biases the spec has.
    Each part is copied from its file into its place, in blocks of rows; nothing is held twice.
    Of a tied model the file may hold the embedding, the head or both; two that differ are both used, as transformers does.
    Raises UsageError on a missing tensor, a wrong shape, one that is no part of the model, and quantised weights.
    """
    shapes = expected_shapes(spec)
    if spec.tied:
        shapes[HEAD] = ((spec.vocab_size, spec.hidden_size), "lm_head", 0, (spec.vocab_size, spec.hidden_size))
    weights: dict[str, Tensor] = {}
    seen: set[str] = set()
    source = tensor_source(model_dir)
    for stored, kind, found in source.headers():
        name = _name_in(shapes, stored)
        if name is None:
            if any(part in stored for part in NOT_THE_MODEL):
                continue
            quantised = stored.endswith(QUANTISED)
            raise UsageError(
                f"unexpected tensor {stored} in {model_dir}",
                "the weights are quantised: use the checkpoint they were made from"
                if quantised
                else f"it is no part of a {spec.architecture}",
            )
        if kind not in FLOATS:
            raise UsageError(
                f"tensor {stored} in {model_dir} is stored as {kind}: the weights are quantised",
                "use the checkpoint they were made from, in bfloat16, float16 or float32",
            )
        if name in seen:
            raise UsageError(f"{model_dir} holds the tensor {name} twice", "fetch the checkpoint again")
        shape, target, start, full_shape = shapes[name]
        if found != shape:
            raise UsageError(
                f"tensor {stored} has shape {list(found)}, and config.json implies {list(shape)}",
                "the weights and config.json belong to different models",
            )
        if target not in weights:
            weights[target] = torch.empty(full_shape, dtype=dtype, device=device)
        _copy(source, stored, weights[target][start : start + shape[0]])
        seen.add(name)
    if spec.tied and (EMBEDDING in seen or HEAD in seen):
        _tie(weights)
        seen |= {EMBEDDING, HEAD}
    missing = sorted(set(shapes) - seen)
    if missing:
        raise UsageError(
            f"{model_dir} lacks {len(missing)} tensors, the first is {missing[0]}",
            "fetch the checkpoint again",
        )
    return weights


def _name_in(shapes: Mapping[str, object], stored: str) -> str | None:
    """The model's name of a stored tensor: a bare model (LlamaModel) is saved without `model.` before its names."""
    return next((n for n in (stored, f"model.{stored}", stored.removeprefix("model.")) if n in shapes), None)


def _tie(weights: dict[str, Tensor]) -> None:
    """One tensor for embedding and head, unless the file holds two that differ."""
    embed = weights["embed"] if "embed" in weights else weights["lm_head"]
    if torch.equal(embed, weights.get("lm_head", embed)):
        weights["embed"] = weights["lm_head"] = embed


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[tuple[int, ...], str, int, tuple[int, ...]]]:
    """HF name -> (its shape, our tensor, first row in it, shape of our tensor)."""
    hidden, inter = spec.hidden_size, spec.intermediate_size
    parts = {
        "q_proj": (spec.q_size, hidden),
        "k_proj": (spec.kv_size, hidden),
        "v_proj": (spec.kv_size, hidden),
        "o_proj": (hidden, spec.q_size),
        "gate_proj": (inter, hidden),
        "up_proj": (inter, hidden),
        "down_proj": (hidden, inter),
    }
    starts = {
        "q_proj": 0,
        "k_proj": spec.q_size,
        "v_proj": spec.q_size + spec.kv_size,
        "gate_proj": 0,
        "up_proj": inter,
    }
    rows = {"qkv_proj": spec.q_size + 2 * spec.kv_size, "gate_up_proj": 2 * inter}
    shapes: dict[str, tuple[tuple[int, ...], str, int, tuple[int, ...]]] = {}

    def whole(name: str, target: str, *shape: int) -> None:
        shapes[name] = (shape, target, 0, shape)

    whole(EMBEDDING, "embed", spec.vocab_size, hidden)
    whole("model.norm.weight", "norm", hidden)
    if not spec.tied:
        whole(HEAD, "lm_head", spec.vocab_size, hidden)
    for i in range(spec.num_layers):
        base = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            whole(f"{base}.{norm}.weight", f"{i}.{norm}", hidden)
        if spec.qk_norm:
            for norm in ("q_norm", "k_norm"):
                whole(f"{base}.self_attn.{norm}.weight", f"{i}.{norm}", spec.head_dim)
        for part, (out, width) in parts.items():
            block = "mlp" if part in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            target = STACKED.get(part, (part, 0))[0]
            total = rows.get(target, out)
            shapes[f"{base}.{block}.{part}.weight"] = (
                (out, width), f"{i}.{target}.weight", starts.get(part, 0), (total, width),
            )  # fmt: skip
            has_bias = {
                "self_attn": spec.o_bias if part == "o_proj" else spec.qkv_bias,
                "mlp": spec.mlp_bias,
            }[block]
            if has_bias:
                shapes[f"{base}.{block}.{part}.bias"] = (
                    (out,),
                    f"{i}.{target}.bias",
                    starts.get(part, 0),
                    (total,),
                )
    return shapes


def weights_digest(model_dir: Path) -> str:
    """xxh3-128 over the content of all weight files, hex. Remembered per (path, size, mtime, inode) in the user cache."""
    files = checkpoint_files(model_dir)
    stamps = [(str(f.resolve()), s.st_size, s.st_mtime_ns, s.st_ino) for f in files for s in [f.stat()]]
    memo_name = hashlib.blake2b(repr(stamps).encode(), digest_size=16).hexdigest()
    memo = user_cache_path("cacheblend") / "weights" / memo_name
    try:
        cached = memo.read_text().strip()
        if len(cached) == 32:
            return cached
    except OSError:
        pass
    digest = xxhash.xxh3_128()
    buffer = bytearray(16 << 20)
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        temporary = memo.with_name(f"{memo.name}.{os.getpid()}")
        temporary.write_text(digest.hexdigest())
        temporary.replace(memo)
    except OSError:
        pass  # a read-only home costs the next run this read again, nothing else
    return digest.hexdigest()


def _copy(source: TensorSource, name: str, target: Tensor) -> None:
    """Copy a tensor in blocks of rows."""
    row_bytes = 4 * max(1, target[0].numel())
    step = max(1, source.block_bytes // row_bytes)
    for start in range(0, target.shape[0], step):
        rows = target[start : start + step]
        rows.copy_(source.read(name, start, start + len(rows)))
