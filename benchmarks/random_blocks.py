"""A GGUF file of random blocks: the layout and the time of a quantised model, without its weights.

    python benchmarks/random_blocks.py FILE LIKE  # Qwen2.5-7B's shape in Q4_K_M; the tokenizer is that of the file LIKE

4.5 GB. Types by layer are those of llama.cpp's Q4_K_M: Q6_K for the output head, and for V and the MLP's down
projection of half of the layers; else Q4_K. The vocabulary is as large as the tokenizer's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

FACTORS = {Kind.Q4_K: {0: 8e-5, 2: 6e-4}, Kind.Q6_K: {208: 1.5e-5}}
"""Kind -> places of a block's float16 factors, and values that give weights of about .02."""
Listed = dict[str, tuple[Kind, tuple[int, ...]]]  # kind and shape of each tensor, in the order of the file


@dataclass(frozen=True)
class Shape:
    """Shape of a Qwen2 model. The head dimension is 128 at Qwen2.5-7B."""

    layers: int = 28
    dim: int = 3584
    mlp_dim: int = 18944
    heads: int = 28
    kv_heads: int = 4


def random_rows(kind: Kind, num_rows: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Return rows of random weights as a file stores them, [num_rows, bytes of a row] uint8."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(rng.bytes(num_rows * width // values * size), np.uint8).reshape(-1, size).copy()
    for place, factor in FACTORS[kind].items():
        blocks[:, place : place + 2] = np.array([factor], np.float16).view(np.uint8)
    return blocks.reshape(num_rows, -1)


def tensors(shape: Shape, num_tokens: int) -> Listed:
    q, kv = shape.dim, shape.dim // shape.heads * shape.kv_heads
    found: Listed = {
        "token_embd.weight": (Kind.Q4_K, (num_tokens, shape.dim)),
        "output_norm.weight": (Kind.F32, (shape.dim,)),
        "output.weight": (Kind.Q6_K, (num_tokens, shape.dim)),
    }
    for layer in range(shape.layers):
        eighth = shape.layers // 8
        more = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
        wide = Kind.Q6_K if more else Kind.Q4_K
        own: Listed = {
            "attn_norm.weight": (Kind.F32, (shape.dim,)),
            **{f"attn_{name}.bias": (Kind.F32, (size,)) for name, size in (("q", q), ("k", kv), ("v", kv))},
            "attn_q.weight": (Kind.Q4_K, (q, shape.dim)),
            "attn_k.weight": (Kind.Q4_K, (kv, shape.dim)),
            "attn_v.weight": (wide, (kv, shape.dim)),
            "attn_output.weight": (Kind.Q4_K, (shape.dim, q)),
            "ffn_norm.weight": (Kind.F32, (shape.dim,)),
            "ffn_gate.weight": (Kind.Q4_K, (shape.mlp_dim, shape.dim)),
            "ffn_up.weight": (Kind.Q4_K, (shape.mlp_dim, shape.dim)),
            "ffn_down.weight": (wide, (shape.dim, shape.mlp_dim)),
        }
        found |= {f"blk.{layer}.{name}": about for name, about in own.items()}
    return found


def write_file(path: Path, like: Path, shape: Shape = Shape()) -> None:
    """Write a file of this shape with the tokenizer of the file `like`, tensor by tensor."""
    part = path.with_suffix(".part")
    writer, tokenizer = gguf.GGUFWriter(part, "qwen2"), gguf.GGUFReader(like)
    writer.add_name(f"random weights in the shape {shape}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.dim)
    writer.add_feed_forward_length(shape.mlp_dim)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, field in tokenizer.fields.items():
        if key.startswith("tokenizer."):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    listed = tensors(shape, len(tokenizer.fields["tokenizer.ggml.tokens"].data))
    for name, (kind, dims) in listed.items():
        if kind == Kind.F32:
            writer.add_tensor_info(name, dims, np.dtype(np.float32), 4 * dims[0])
        else:
            stored = gguf.quant_shape_to_byte_shape(dims, kind)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for name, (kind, dims) in listed.items():
        plain = np.full(dims, "norm" in name, np.float32) if kind == Kind.F32 else None
        writer.write_tensor_data(random_rows(kind, *dims, rng) if plain is None else plain)
    writer.close()
    part.rename(path)


if __name__ == "__main__":
    write_file(Path(sys.argv[1]), Path(sys.argv[2]))
