"""Blending by llama.cpp alone: time to the first token over a full prefill's, and KL from it, for runs of recomputed tokens.

    python study/llama_alone.py [--model smollm2] [--file FILE.gguf] [--chunks 8] [--ratio 0.15] [--blocks 8,16,32] [--rounds 3]

Chunks are states of sequences of their own, behind the prompt's prefix. For a prompt they are loaded, moved to their places and joined
into one sequence; each run of chosen tokens is then decoded in a second sequence over what is before it, and replaces the old cells; the
question follows. Runs are spread evenly, at the beginning of each chunk, or where this engine's `query` selector puts them
(`--block`). Nothing else of cacheblend's is in the time. No correction is applied.

--model: what cacheblend plans and selects with; --file: what llama.cpp computes with, by default the model's own GGUF file. Use a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from cacheblend_store import ChunkStore

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.connectors.llama_library import library
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.types import Answer, AskOptions, AskRequest, BlendParams, SamplingParams

PROMPT, WORK, LOADED = range(3)  # sequences
BATCH = 512
QUESTION = "Who leads the team, and since when?"
Run = tuple[int, int]


@dataclass(frozen=True)
class Chunk:
    start: int
    end: int
    state: np.ndarray  # of prefix and chunk, at the positions they were collected at


class Alone:
    """A GGUF file in llama.cpp, driven by its sequences' operations."""

    def __init__(self, file: Path, num_tokens: int, num_threads: int) -> None:
        self.llama = library()
        for name, more in (("seq_add", 1), ("seq_cp", 1)):
            bound = getattr(self.llama, f"llama_memory_{name}")
            bound.restype, bound.argtypes = None, (c_void_p, *[c_int32] * (3 + more))
        model = self.llama.load_model(file)
        self.vocab_size = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(model))
        self.context = self.llama.new_context(model, 3 * num_tokens, 3, num_threads, BATCH)
        self.memory, self.batch = self.llama.llama_get_memory(self.context), self.llama.llama_batch_init(BATCH, 0, 1)

    def decode(self, ids: Sequence[int], start: int, sequence: int) -> torch.Tensor:
        """Logits after the last of the ids, which stand at start and behind."""
        for first in range(0, len(ids), BATCH):
            part = ids[first : first + BATCH]
            self.batch.n_tokens = len(part)
            for row, token in enumerate(part):
                self.batch.token[row], self.batch.pos[row], self.batch.n_seq_id[row] = token, start + first + row, 1
                self.batch.seq_id[row][0], self.batch.logits[row] = sequence, first + row == len(ids) - 1
            if failed := self.llama.llama_decode(self.context, self.batch):
                raise self.llama.error(f"llama.cpp failed to decode (code {failed})")
        found = self.llama.llama_get_logits_ith(self.context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(found, (self.vocab_size,)).copy())

    def clear(self, sequence: int, start: int = -1, end: int = -1) -> None:
        self.llama.llama_memory_seq_rm(self.memory, sequence, start, end)

    def state(self, sequence: int) -> np.ndarray:
        state = np.empty(self.llama.llama_state_seq_get_size(self.context, sequence), np.uint8)
        self.llama.llama_state_seq_get_data(self.context, state.ctypes.data, len(state), sequence)
        return state

    def load(self, state: np.ndarray, sequence: int) -> None:
        if not self.llama.llama_state_seq_set_data(self.context, state.ctypes.data, len(state), sequence):
            raise self.llama.error("llama.cpp refuses a state")

    def collect(self, ids: Sequence[int], prefix: int, spans: Sequence[Run]) -> tuple[np.ndarray, list[Chunk]]:
        """States of the prefix, and of each chunk behind it."""
        self.decode(ids[:prefix], 0, LOADED)
        head, chunks = self.state(LOADED), []
        for start, end in spans:
            self.clear(LOADED, prefix)
            self.decode(ids[start:end], prefix, LOADED)
            chunks.append(Chunk(start, end, self.state(LOADED)))
        self.clear(LOADED)
        return head, chunks

    def blend(
        self, ids: Sequence[int], prefix: int, stored: tuple[np.ndarray, list[Chunk]], runs: list[Run]
    ) -> torch.Tensor:
        """Logits after the prompt. Everything between the chunks' places is computed."""
        head, chunks = stored
        self.clear(PROMPT)
        self.load(head, PROMPT)
        for chunk in chunks:
            self.load(chunk.state, LOADED)
            self.clear(LOADED, 0, prefix)
            self.llama.llama_memory_seq_add(self.memory, LOADED, prefix, -1, chunk.start - prefix)
            self.llama.llama_memory_seq_cp(self.memory, LOADED, PROMPT, -1, -1)
            self.clear(LOADED)
        for start, end in sorted([*runs, *gaps(prefix, chunks)]):
            self.llama.llama_memory_seq_cp(self.memory, PROMPT, WORK, 0, start)
            self.decode(ids[start:end], start, WORK)
            self.clear(PROMPT, start, end)
            self.llama.llama_memory_seq_cp(self.memory, WORK, PROMPT, start, end)
            self.clear(WORK)
        return self.decode(ids[chunks[-1].end :], chunks[-1].end, PROMPT)

    def full(self, ids: Sequence[int]) -> torch.Tensor:
        self.clear(PROMPT)
        return self.decode(ids, 0, PROMPT)


def gaps(prefix: int, chunks: Sequence[Chunk]) -> list[Run]:
    """Tokens between chunks, which belong to none."""
    ends = [prefix, *(chunk.end for chunk in chunks)]
    return [(end, chunk.start) for end, chunk in zip(ends, chunks, strict=False) if end < chunk.start]


def spread(spans: Sequence[Run], block: int, ratio: float) -> list[Run]:
    """Runs of `block` tokens at equal distances in all chunks but the first, whose KV is exact."""
    positions = [position for start, end in spans[1:] for position in range(start, end)]
    count = max(1, round(len(positions) * ratio / block))
    firsts = (i * len(positions) // count for i in range(count))
    return runs_of([position for first in firsts for position in positions[first : first + block]])


def beginnings(spans: Sequence[Run], ratio: float) -> list[Run]:
    return [(start, start + max(1, round((end - start) * ratio))) for start, end in spans[1:]]


def runs_of(positions: Sequence[int]) -> list[Run]:
    """Runs of adjacent positions."""
    cuts = [i for i, (a, b) in enumerate(pairwise(positions), 1) if b != a + 1]
    return [(positions[a], positions[b - 1] + 1) for a, b in pairwise([0, *cuts, len(positions)]) if a < b]


def asked(engine: Engine, keys: list[bytes], blend: BlendParams, verify: bool = False) -> Answer:
    """cacheblend's own answer, which says what it chose."""
    sampling, options = SamplingParams(max_tokens=1, ignore_eos=True), AskOptions(verify=verify, save=False)
    return engine.ask(AskRequest(QUESTION, keys, blend, sampling, options=options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--documents", type=Path, default=Path(__file__).parent.parent / "cacheblend_cli/demo/handbook")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--blocks", default="8,16,32")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    engine, ratio = Engine.load(EngineConfig(arguments.model, decode_with="torch")), arguments.ratio
    blocks = [int(block) for block in arguments.blocks.split(",")]
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder), mode="write") as store, engine:
        options = PrecomputeOptions(chunk_tokens=arguments.chunk_tokens, context="sink")
        engine.precompute(store, [str(arguments.documents)], options, lambda event: None)
        engine.use(store)
        keys = sorted(manifest.key for manifest in store.chunks())[: arguments.chunks]
        default = asked(engine, keys, BlendParams(ratio=ratio), verify=True)
        chosen = {block: asked(engine, keys, BlendParams(ratio=ratio, block=block)).chosen for block in blocks}
    ids, spans = default.prompt_ids, [(chunk.start, chunk.start + chunk.tokens) for chunk in default.chunks]
    assert default.verify is not None
    own_kl = default.verify.kl
    alone = Alone(arguments.file or engine.model.shown_path, len(ids) + 64, torch.get_num_threads())
    stored = alone.collect(ids, spans[0][0], spans)
    rows: dict[str, list[Run]] = {"reuse": [], "all": [(start, end) for start, end in spans[1:]]}
    rows["first of chunk"] = beginnings(spans, ratio)
    for block in blocks:
        rows[f"spread, {block}"], rows[f"query, {block}"] = spread(spans, block, ratio), runs_of(chosen[block])
    expected = alone.full(ids).log_softmax(-1)
    seconds: dict[str, list[float]] = {name: [] for name in ("full", *rows)}
    kl = {}
    for _ in range(arguments.rounds):
        for name in seconds:
            start = time.perf_counter()
            logits = alone.full(ids) if name == "full" else alone.blend(ids, spans[0][0], stored, rows[name])
            seconds[name].append(time.perf_counter() - start)
            found = logits.log_softmax(-1)
            kl[name] = float((expected.exp() * (expected - found)).sum())
    print(json.dumps({"tokens": len(ids), "chunks": len(spans), "library": alone.llama.name, "cacheblend_kl": own_kl}))
    full_s = statistics.median(seconds["full"])
    for name, times in seconds.items():
        runs = rows.get(name, [])
        share, median = sum(b - a for a, b in runs) / (spans[-1][1] - spans[1][0]), statistics.median(times)
        print(
            f"{name:16} runs {len(runs):4}  share {share:.3f}  {median:.3f} s  {full_s / median:5.2f} x  KL {kl[name]:.4f}"
        )


if __name__ == "__main__":
    main()
