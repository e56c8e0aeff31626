"""What the blob of each codec holds. No torch here, so that records can be checked without it."""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType

from cacheblend_store.errors import BadBlob
from cacheblend_store.format.blobs import BlobSpec, TensorSpec

GROUP = 32  # tokens that share one K scale in the int codecs
PLAIN = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
CODECS = (*PLAIN, "float8_e4m3", "int8", "int4")


@lru_cache(maxsize=1024)  # a loader asks hundreds of times for a few shapes
def blob_spec(codec: str, num_tokens: int, num_kv_heads: int, head_dim: int) -> BlobSpec:
    """The tensors of one layer. Plain codecs: k and v [tokens, num_kv_heads, head_dim]. float8_e4m3 adds a scale a head.

    int8, int4 (KIVI, arXiv 2402.02750): K per channel in groups of GROUP tokens, V per token, asymmetric (scale and
    zero point in float32); int4 packs two channels a byte.
    """
    shape = (num_tokens, num_kv_heads, head_dim)
    if codec in PLAIN:
        return MappingProxyType({"k": TensorSpec(PLAIN[codec], shape), "v": TensorSpec(PLAIN[codec], shape)})
    if codec == "float8_e4m3":
        scale = TensorSpec("F32", (num_kv_heads,))
        kv = TensorSpec("F8_E4M3", shape)
        return MappingProxyType({"k": kv, "v": kv, "k_scale": scale, "v_scale": scale})
    if codec in ("int8", "int4"):
        groups = -(-num_tokens // GROUP)
        packed = shape if codec == "int8" else (num_tokens, num_kv_heads, head_dim // 2)
        k_scale = TensorSpec("F32", (groups, num_kv_heads, head_dim))
        v_scale = TensorSpec("F32", (num_tokens, num_kv_heads, 1))
        kv = TensorSpec("U8", packed)
        scales = {"k_scale": k_scale, "k_zero": k_scale, "v_scale": v_scale, "v_zero": v_scale}
        return MappingProxyType({"k": kv, "v": kv, **scales})
    raise BadBlob(f"unknown codec {codec!r}", f"known: {', '.join(CODECS)}")
