"""Time llama.cpp in a process of its own: `python -m cacheblend_cli.engine.connectors.llama_probe FILE THREADS`.

Prints {"decode_s"} (seconds of a token, the best of a few) or {"error"}. Code that the machine cannot run ends this process and not
the one that answers (ggml's AMX code dies with SIGILL on some virtual machines).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from cacheblend_cli.engine.connectors.llama_library import LlamaError, library

PROMPT_TOKENS, STEPS = 8, 8
"""A batch of 8 is what takes ggml's code for many rows."""


def main(path: str, threads: str) -> None:
    try:
        found: dict[str, float | str] = {"decode_s": decode_s(Path(path), int(threads))}
    except LlamaError as error:
        found = {"error": error.message}
    print(json.dumps(found))


def decode_s(file: Path, num_threads: int) -> float:
    """Seconds of a decoded token. Raises LlamaError."""
    llama = library()
    model = llama.load_model(file)
    context = llama.new_context(model, 256, 1, num_threads)
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch, position, best = llama.llama_batch_init(PROMPT_TOKENS, 0, 1), 0, float("inf")
    for count in (PROMPT_TOKENS, *[1] * STEPS):
        batch.n_tokens = count
        for row in range(count):
            batch.token[row], batch.pos[row] = (position + row) * size // (PROMPT_TOKENS + STEPS), position + row
            batch.n_seq_id[row], batch.logits[row] = 1, 1
            batch.seq_id[row][0] = 0
        start = time.perf_counter()
        if failed := llama.llama_decode(context, batch):
            raise llama.error(f"llama.cpp failed to decode (code {failed})")
        llama.llama_get_logits_ith(context, count - 1)  # waits for the device
        best = min(best, time.perf_counter() - start) if count == 1 else best
        position += count
    return best


if __name__ == "__main__":
    main(*sys.argv[1:])
