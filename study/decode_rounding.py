"""How far decode steps are from a prefill of the same tokens, for quantised weights on a CPU (docs/fidelity.md).

    python study/decode_rounding.py MODEL [MODEL ...]

Prefills 300 tokens of a page of the documentation and the 300 behind them, then decodes these one by one, and compares
the distributions at every position: mean, median and maximum of the KL divergence, and how often the most likely token
is the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from cacheblend_cli.blend.fidelity import divergence, log_distribution
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.kv.forward import forward
from cacheblend_cli.kv.rows import rows_of

PAGE = Path(__file__).parents[1] / "docs/store.md"
TOKENS = 300


@torch.inference_mode()
def measure(model: str, dtype: str) -> str:
    runtime = Runtime.load(EngineConfig(model=model, dtype=dtype))
    decoder, end = runtime.decoder, 2 * TOKENS
    ids = torch.tensor(runtime.model.tokenizer.encode_text(PAGE.read_text(encoding="utf-8"))[:end])
    memory = runtime.memory_for(-(-end // runtime.config.block_size) + 1)
    sequence = memory.pool.new_sequence(end)
    first, second = torch.arange(TOKENS), torch.arange(TOKENS, end)
    forward(decoder, rows_of(decoder, sequence, first, TOKENS, TOKENS), ids[:TOKENS])
    prefilled = forward(decoder, rows_of(decoder, sequence, second, end, end), ids[TOKENS:])
    decoded = []
    for at in range(TOKENS, end):
        memory.runner.begin([sequence], [at], 1)
        decoded.append(memory.runner.step(ids[at : at + 1]).clone())
    found = divergence(log_distribution(prefilled), log_distribution(torch.cat(decoded)))
    kl, same = torch.tensor(found.kl), sum(found.top1) / len(found.top1)
    return f"KL {kl.mean():.1e}, median {kl.median():.1e}, maximum {kl.max():.1e}; same token {same:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    for model in parser.parse_args().models:
        for dtype in ("float32", "bfloat16"):
            print(f"{Path(model).name}, {dtype}: {measure(model, dtype)}", flush=True)


if __name__ == "__main__":
    main()
