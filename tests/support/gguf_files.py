"""GGUF files of random checkpoints, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

SCALES = {  # of K-quants: where a block has its float16 factors, and how large they may be
    "Q2_K": {80: 0.02, 82: 0.02},
    "Q3_K": {108: 0.002},
    "Q4_K": {0: 0.0003, 2: 0.0003},
    "Q5_K": {0: 0.0002, 2: 0.0003},
    "Q6_K": {208: 0.0001},
}


def write_gguf(
    checkpoint: Path, file: Path, arch: str, kind: str, pre: str = "gpt-2", extra: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """The checkpoint with its matrices in `kind`; returns the weights that are in the file, under transformers' names.

    K-quants are not quantised, which the package does not do, but drawn. extra: more metadata; a value of None takes
    one out.
    """
    state = load_file(checkpoint / "model.safetensors")
    writer, config, names = begun(checkpoint, file, arch, pre, extra)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rng, written = np.random.default_rng(0), {}
    for name, tensor in state.items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        data = tensor.float().numpy()
        used = Kind[kind] if data.ndim > 1 else Kind.F32
        count = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else 0
        if arch == "llama" and count:
            data = permuted(data, count)
        stored = _drawn(rng, data.shape, kind) if kind in SCALES and data.ndim > 1 else gguf.quantize(data, used)
        plain = used in (Kind.F32, Kind.F16)
        writer.add_tensor(own, stored, raw_dtype=None if plain else used)
        found = gguf.dequantize(stored, used).reshape(data.shape)
        written[name] = torch.from_numpy(restored(found, count) if arch == "llama" and count else found.copy())
    if rope := config["rope_parameters"].get("factor"):
        writer.add_tensor("rope_freqs.weight", llama3_factors(config["rope_parameters"], head_dim, rope))
    ended(writer)
    return written


def begun(
    checkpoint: Path, file: Path, arch: str, pre: str = "gpt-2", extra: dict[str, Any] | None = None
) -> tuple[gguf.GGUFWriter, dict[str, Any], gguf.TensorNameMap]:
    """A writer with the metadata of the checkpoint, its config, and the names of its tensors."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer, heads = gguf.GGUFWriter(file, arch), config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
        "rope.dimension_count": head_dim,
        **(extra or {}),
    }
    for key, value in values.items():
        if value is not None:
            add = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
            }
            add[type(value)](f"{arch}.{key}", value)  # fmt: skip
    _add_tokenizer(writer, checkpoint, config["vocab_size"], pre)
    kind = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch)
    return writer, config, gguf.get_tensor_name_map(kind, config["num_hidden_layers"])


def ended(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape))


def restored(weights: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `permuted`."""
    shape = (heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:])
    return np.ascontiguousarray(weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape))


def llama3_factors(rope: dict[str, Any], head_dim: int, factor: float) -> np.ndarray:
    """`LlamaModel.generate_extra_tensors` of llama.cpp's convert_hf_to_gguf.py."""
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def _drawn(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Random blocks of a K-quant, [rows, bytes of a row]."""
    values, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
    for at, scale in SCALES[kind].items():
        blocks[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, vocab_size: int, pre: str) -> None:
    data = json.loads((checkpoint / "tokenizer.json").read_text())
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    ids = dict(data["model"]["vocab"])
    kinds = dict.fromkeys(ids, gguf.TokenType.NORMAL)
    for added in data["added_tokens"]:
        ids[added["content"]] = added["id"]
        kinds[added["content"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    tokens = {i: token for token, i in ids.items()}
    listed = [tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    if data["model"].get("byte_fallback"):  # SentencePiece: scores in place of merges, bytes of a kind of their own
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(i) for i in range(vocab_size)])
        writer.add_add_space_prefix(False)
        kinds |= {token: gguf.TokenType.BYTE for token in kinds if re.fullmatch(r"<0x[0-9A-F]{2}>", token)}
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    writer.add_token_list(listed)
    writer.add_token_types([kinds.get(token, gguf.TokenType.UNUSED) for token in listed])
    writer.add_bos_token_id(ids[config["bos_token"]])
    writer.add_eos_token_id(ids[config["eos_token"]])
    writer.add_chat_template(config["chat_template"])
