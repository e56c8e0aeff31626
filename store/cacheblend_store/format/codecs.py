"""Encode and decode K and V: exact dtypes, float8, and KIVI-style int8 and int4."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cacheblend_store.errors import CodecError
from cacheblend_store.format.blobs import CODECS, FLOAT8, GROUP, PLAIN, blob_spec, encode_blob

__all__ = ["CODECS", "blob_spec", "coded", "decode_kv", "encode_kv", "is_lossless", "view_kv"]

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
}


def is_lossless(codec: str, dtype: torch.dtype) -> bool:
    """Return whether the codec stores KV of `dtype` without loss."""
    return codec == "float32" or str(dtype) == f"torch.{codec}"


def encode_kv(k: Tensor, v: Tensor, codec: str) -> bytes:
    """Return a blob of k and v, see `coded`."""
    spec, tensors = blob_spec(codec, *k.shape, v.shape[-1]), coded(k, v, codec)
    return encode_blob(spec, {name: _bytes(tensors[name]) for name in spec})


def coded(k: Tensor, v: Tensor, codec: str) -> dict[str, Tensor]:
    """Return the tensors of a blob of k and v, both [tokens, num_kv_heads, head_dim] (v's may differ), any float dtype, any device.

    Raises CodecError for values beyond the codec's range, and in codecs that scale for infinities and NaNs.
    """
    k, v = k.detach().cpu(), v.detach().cpu()
    if codec in PLAIN:
        return {name: _converted(t, codec) for name, t in (("k", k), ("v", v))}
    if codec not in FLOAT8:
        return _encode_int(k.float(), v.float(), 4 if codec == "int4" else 8)
    tensors, dtype = {}, DTYPES[FLOAT8[codec]]
    most = torch.finfo(dtype).max
    for name, t in (("k", k.float()), ("v", v.float())):
        scale = _scale(t.abs().amax(dim=(0, 2)) / most, codec)
        tensors[name] = (t / scale[None, :, None]).clamp(-most, most).to(dtype)
        tensors[f"{name}_scale"] = scale
    return tensors


def view_kv(
    parts: Mapping[str, memoryview], codec: str, num_tokens: int, num_kv_heads: int, head_dim: int, v_head_dim: int = 0
) -> dict[str, Tensor]:
    """Return zero-copy tensors over a blob's parts, as described by `blobs.blob_spec`. Valid as long as the bytes are."""
    spec = blob_spec(codec, num_tokens, num_kv_heads, head_dim, v_head_dim)
    return {n: torch.frombuffer(parts[n], dtype=DTYPES[t.dtype]).view(t.shape) for n, t in spec.items()}


def decode_kv(tensors: Mapping[str, Tensor], codec: str) -> tuple[Tensor, Tensor]:
    """Return k and v [tokens, num_kv_heads, head_dim] in fp32, copies, from the tensors of `coded` or `view_kv`."""
    k, v = tensors["k"], tensors["v"]
    if codec in PLAIN:
        return k.to(torch.float32, copy=True), v.to(torch.float32, copy=True)
    if codec in FLOAT8:
        return k.float() * tensors["k_scale"][None, :, None], v.float() * tensors["v_scale"][None, :, None]
    if codec == "int4":
        k, v = _unpack4(k), _unpack4(v)
    num_tokens = k.shape[0]
    k_scale, k_zero = (tensors[n].repeat_interleave(GROUP, 0)[:num_tokens] for n in ("k_scale", "k_zero"))
    return k.float() * k_scale + k_zero, v.float() * tensors["v_scale"] + tensors["v_zero"]


def _converted(x: Tensor, codec: str) -> Tensor:
    """Return x in a plain codec's dtype. Raises CodecError if a finite value overflows."""
    out = x.to(DTYPES[PLAIN[codec]])
    if out.dtype != x.dtype and bool((out.isinf() & x.isfinite()).any()):
        raise CodecError(
            f"the KV has values up to {float(x.abs().nan_to_num(posinf=0).max()):.3g}, which {codec} cannot hold",
            "use --kv-dtype bfloat16 or float32",
        )
    return out


def _scale(scale: Tensor, codec: str) -> Tensor:
    if not bool(scale.isfinite().all()):
        raise CodecError(
            f"the KV has values that are not finite, which {codec} cannot store",
            "check the model and its --dtype; --kv-dtype float32 stores anything",
        )
    return scale.clamp_min(1e-12)


def _encode_int(k: Tensor, v: Tensor, bits: int) -> dict[str, Tensor]:
    levels, codec = 2**bits - 1, f"int{bits}"
    num_tokens = k.shape[0]
    padding = -num_tokens % GROUP
    grouped = torch.cat((k, k[-1:].expand(padding, -1, -1))).view(-1, GROUP, *k.shape[1:])
    k_zero = grouped.amin(1)
    k_scale = _scale((grouped.amax(1) - k_zero) / levels, codec)
    k_codes = ((grouped - k_zero[:, None]) / k_scale[:, None]).round().clamp(0, levels)
    k_codes = k_codes.view(-1, *k.shape[1:])[:num_tokens].to(torch.uint8)
    v_zero = v.amin(2, keepdim=True)
    v_scale = _scale((v.amax(2, keepdim=True) - v_zero) / levels, codec)
    v_codes = ((v - v_zero) / v_scale).round().clamp(0, levels).to(torch.uint8)
    if bits == 4:
        k_codes, v_codes = _pack4(k_codes), _pack4(v_codes)
    return {
        "k": k_codes, "v": v_codes, "k_scale": k_scale, "k_zero": k_zero, "v_scale": v_scale, "v_zero": v_zero,
    }  # fmt: skip


def _pack4(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unpack4(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data).cast("B")
