"""KL of next-token distributions with quantised weights, against the same model without: kinds of GGUF blocks.

    python study/weight_kinds.py MODEL --text FILE... [--tokens 512] [--shuffle]

MODEL: a Llama or Qwen2. --shuffle reorders its channels, which leaves its results as they are: the blocks of a file
that is quantised already would otherwise fit their own grid, and lose nothing. Q4_K is our own quantiser after the
published format: for each 32 weights the scale and minimum with the least squared error over some roundings.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from cacheblend_cli.model.checkpoint import tensor_source
from cacheblend_cli.model.locate import resolve_model
from cacheblend_cli.model.tokenizer import Tokenizer

KINDS = ("Q8_0", "Q4_K", "Q4_1", "Q4_0")
ROUNDINGS = (14.0, 14.5, 15.0, 15.5, 16.0)  # steps between a run's minimum and maximum
ROWS = 2048  # quantised at once


def rounded(weight: Tensor, kind: str) -> Tensor:
    """Quantise and dequantise a matrix in fp32, [rows, columns]."""
    if kind == "Q4_K":
        return q4_k(weight) if weight.shape[1] % 256 == 0 else rounded(weight, "Q4_1")
    of_gguf = GGMLQuantizationType[kind]
    blocks = quantize(weight.numpy(), of_gguf)
    return torch.from_numpy(dequantize(blocks, of_gguf))


def q4_k(weight: Tensor) -> Tensor:
    """As `rounded`: 16 steps, with scale and minimum of 6 bits for 32 values, and their factors for 256 in float16."""
    x = weight.reshape(-1, 8, 32)
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    scale, least = torch.zeros_like(low), -low
    for steps in ROUNDINGS:
        codes = ((x - low) * (steps / (high - low).clamp_min(1e-20))).add(0.5).floor().clamp(0, 15)
        sums, squares = codes.sum(-1, keepdim=True), (codes * codes).sum(-1, keepdim=True)
        total, products = x.sum(-1, keepdim=True), (codes * x).sum(-1, keepdim=True)
        slope = (32 * products - total * sums) / (32 * squares - sums * sums)
        base = (total - slope * sums) / 32
        slope, base = torch.where(base > 0, products / squares, slope), base.clamp_max(0)
        error = (slope * codes + base - x).square().sum(-1, keepdim=True)
        better = error < best  # false for NaN
        best, scale = torch.where(better, error, best), torch.where(better, slope, scale)
        least = torch.where(better, -base, least)
    scale, least = _in_6_bits(scale), _in_6_bits(least)
    codes = ((x + least) / scale).add(0.5).floor().nan_to_num(0).clamp(0, 15)
    return (codes * scale - least).view_as(weight)


def _in_6_bits(values: Tensor) -> Tensor:
    factor = (values.amax(1, keepdim=True) / 63).half().float()
    return factor * (values / factor).nan_to_num(0).round().clamp(0, 63)


def shuffled(read: Callable[[str], Tensor], hidden: int, inner: int, head: int) -> Callable[[str], Tensor]:
    """Return `read` for the same model with the channels of hidden states, MLPs and V in another order. head: size."""

    def order(seed: int, size: int) -> Tensor:
        return torch.randperm(size, generator=torch.Generator().manual_seed(seed))

    outer, of_head = order(0, hidden), order(1, head)

    def reordered(name: str) -> Tensor:
        weight = read(name)
        if "v_proj" in name:
            weight = weight.unflatten(0, (-1, head))[:, of_head].flatten(0, 1)
        if name.endswith("bias"):
            return weight
        if "norm" in name:
            return weight[outer]
        if "o_proj" in name:
            return weight[outer].unflatten(1, (-1, head))[:, :, of_head].flatten(1)
        own = order(2 + int(name.split(".")[2]), inner) if "mlp" in name else outer
        if "down_proj" in name:
            return weight[outer][:, own]
        return (weight[own] if "mlp" in name else weight)[:, outer]

    return reordered


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--shuffle", action="store_true")
    args = parser.parse_args()
    path = resolve_model(args.model)
    source, config = tensor_source(path), AutoConfig.from_pretrained(path)
    shapes = {name: shape for name, _, shape in source.headers()}

    def read(name: str) -> Tensor:
        return source.read(name, 0, shapes[name][0]).float().clone()

    if args.shuffle:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        read = shuffled(read, config.hidden_size, config.intermediate_size, head)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = Tokenizer(path).encode_text("\n\n".join(file.read_text() for file in args.text))[: args.tokens]

    def distribution(kind: str | None) -> Tensor:
        for name, parameter in model.named_parameters():
            weight = read(name)
            if kind is not None and weight.dim() == 2:
                for rows in weight.split(ROWS):
                    rows.copy_(rounded(rows.contiguous(), kind))
            parameter.copy_(weight)
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    own = distribution(None)
    print("| kind | mean KL | median | 90th percentile | same likeliest token |\n|---|---|---|---|---|")
    for kind in KINDS:
        other = distribution(kind)
        kl = (own.exp() * (own - other)).sum(-1).numpy()
        same = (own.argmax(-1) == other.argmax(-1)).float().mean()
        print(
            f"| {kind} | {kl.mean():.4f} | {np.median(kl):.4f} | {np.percentile(kl, 90):.4f} | {same:.1%} |", flush=True
        )


if __name__ == "__main__":
    main()
