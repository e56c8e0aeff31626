"""How far prefills and decode steps are from a prefill with products in floats, for quantised weights on a CPU.

    python study/rounding.py MODEL [MODEL ...]

Computes 300 tokens of each of three pages of the documentation behind 300 others, as a prefill and one by one, in
float32 and in bfloat16. Compares the distributions at the 900 positions with those of a prefill in float32 whose
products are in floats: KL in nats per token, and how many likeliest tokens differ (docs/fidelity.md). The row "in 8
bits" is a prefill in float32 whose activations are rounded to 8 bits before such products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from cacheblend_kernels import RowTable, compiled
from results import hardware
from torch import Tensor

from cacheblend_cli.blend.fidelity import divergence, log_distribution
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.kv.forward import forward
from cacheblend_cli.kv.rows import rows_of

DOCS = Path(__file__).parents[1] / "docs"
PAGES = "store.md", "search.md", "serve.md"
TOKENS = 300
Product = Callable[[Tensor, RowTable, Tensor | None], Tensor | None]


def in_bytes(product: Product, x: Tensor, table: RowTable, bias: Tensor | None) -> Tensor | None:
    """Return the product with x rounded to 8 bits, with one scale for each 32 values."""
    runs = x.unflatten(-1, (-1, 32))
    scales = runs.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return product((runs / scales).round().mul(scales).flatten(-2), table, bias)


def page_ids(runtime: Runtime) -> list[Tensor]:
    """Return the first 2 * TOKENS token ids of each page."""
    encode = runtime.model.tokenizer.encode_text
    return [torch.tensor(encode((DOCS / page).read_text(encoding="utf-8"))[: 2 * TOKENS]) for page in PAGES]


def prefilled(runtime: Runtime, ids: Tensor) -> Tensor:
    """Return logits [TOKENS, vocab_size] of the second half of the ids by a prefill of all."""
    memory = runtime.memory_for(-(-len(ids) // runtime.config.block_size) + 1)
    rows = rows_of(runtime.decoder, memory.pool.new_sequence(len(ids)), torch.arange(len(ids)), len(ids), len(ids))
    return forward(runtime.decoder, rows, ids)[TOKENS:]


def decoded(runtime: Runtime, ids: Tensor) -> Tensor:
    """As `prefilled`, by decode steps behind a prefill of the first half."""
    memory = runtime.memory_for(-(-len(ids) // runtime.config.block_size) + 1)
    sequence = memory.pool.new_sequence(len(ids))
    rows = rows_of(runtime.decoder, sequence, torch.arange(TOKENS), TOKENS, TOKENS)
    forward(runtime.decoder, rows, ids[:TOKENS])
    logits = []
    for at in range(TOKENS, len(ids)):
        memory.runner.begin([sequence], [at], 1)
        logits.append(memory.runner.step(ids[at : at + 1]).clone())
    return torch.cat(logits)


def figures(reference: list[Tensor], ours: list[Tensor]) -> str:
    """Return KL's mean, median, 90th percentile and maximum, and the number of likeliest tokens that differ. reference,
    ours: logits of each page."""
    found = [divergence(*map(log_distribution, pair)) for pair in zip(reference, ours, strict=True)]
    kl = torch.tensor([kl for page in found for kl in page.kl])
    others = sum(not same for page in found for same in page.top1)
    return f"{kl.mean():.1e} | {kl.median():.1e} | {kl.quantile(0.9):.1e} | {kl.max():.1e} | {others}"


@torch.inference_mode()
def measure(model: str) -> Iterator[tuple[str, str]]:
    """Yield what computes, and its figures."""
    runtime = Runtime.load(EngineConfig(model=model, dtype="float32"))
    ids, floats = page_ids(runtime), partial(compiled.prefill_product, way=0)
    with patch.object(compiled, "prefill_product", floats):
        reference = [prefilled(runtime, page) for page in ids]
    with patch.object(compiled, "prefill_product", partial(in_bytes, floats)):
        yield "float32, prefill in 8 bits", figures(reference, [prefilled(runtime, page) for page in ids])
    for dtype in ("float32", "bfloat16"):
        runtime = Runtime.load(EngineConfig(model=model, dtype=dtype))
        for name, compute in {"prefill": prefilled, "decode steps": decoded}.items():
            yield f"{dtype}, {name}", figures(reference, [compute(runtime, page) for page in ids])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    models = parser.parse_args().models
    print(f"{hardware()}\n")
    print("| model | computed in | mean KL | median | 90th percentile | maximum | other likeliest token |")
    print("|---|---|---|---|---|---|---|")
    for model in models:
        for name, found in measure(model):
            print(f"| {Path(model).stem} | {name} | {found} |", flush=True)


if __name__ == "__main__":
    main()
