"""Blending by llama.cpp alone: time to the first token over a full prefill's, and KL from it, for runs of recomputed
tokens.

    python study/llama_alone.py --data FOLDER [--questions 12] [--model smollm2] [--file FILE.gguf] [--ratio 0.15]
    [--blocks 8,16,32]
        [--passages 4] [--times]

Chunks are states of sequences of their own, behind the prompt's prefix. For a prompt they are loaded, moved to their
places and joined into one sequence; each run of chosen tokens is then decoded in a second sequence over what is before
it, and replaces the old cells; the question follows. Runs are spread evenly, at the beginning of each chunk, or where
this engine's `query` selector puts them (`--block`). Nothing else of cacheblend's is in the time.

*corrected*: before the question the state is read, K and V of the tokens that were not recomputed are moved by this
engine's regression (`blend/corrections.py`) from the changes of those that were, and the state is written back. Runs
were computed over unmoved KV then: inside llama.cpp there is no moment between two layers.

FOLDER has musique_dev.json; a question has its first --passages passages. KL is the mean over the first 16 tokens of
each engine's own full prefill's greedy answer, each token fed to both; the times are of the same runs. --model: what
cacheblend plans and selects with; --file: what llama.cpp computes with, by default the model's own GGUF file. --times:
no KL, for random weights. For the times use a quiet machine. The page goes to stdout, figures of each question to
stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from cacheblend_store import ChunkStore
from sets import musique
from torch import Tensor

from cacheblend_cli.blend.corrections import CHUNK, COMMON, LENGTHS, NEAR, _noise, _solved
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.connectors.llama_cpp.library import ROPE_NORM, library
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.model.machine_speeds import cpu_name
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.types import Answer, AskOptions, AskRequest, BlendParams, SamplingParams, TextDocument

PROMPT, WORK, LOADED = range(3)  # sequences
BATCH = 512
ANSWER = 16  # tokens over which KL is a mean
SOONER, NEAR_ENOUGH = 2.5, 1.5
INTRODUCTION = """By `study/llama_alone.py`: stored chunks are placed, joined and repaired by llama.cpp's own sequence operations, and nothing else computes. *sooner*: its full
prefill's time over blending's, median. KL: from its own full prefill, mean over the first 16 tokens of the answer; the default's is from cacheblend's."""
Run = tuple[int, int]
Way = tuple[str, bool]
"""How tokens are chosen, and whether the others are corrected."""


@dataclass(frozen=True)
class Chunk:
    start: int
    end: int
    state: np.ndarray  # of prefix and chunk, at the positions they were collected at


class Alone:
    """A GGUF file in llama.cpp, driven by its sequences' operations."""

    def __init__(self, file: Path, spec: ModelSpec, num_tokens: int, num_threads: int) -> None:
        self.llama = library()
        for name, more in (("seq_add", 1), ("seq_cp", 1)):
            bound = getattr(self.llama, f"llama_memory_{name}")
            bound.restype, bound.argtypes = None, (c_void_p, *[c_int32] * (3 + more))
        model = self.llama.load_model(file)
        self.vocab_size = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(model))
        self.context = self.llama.new_context(model, 3 * num_tokens, 3, num_threads, BATCH)
        self.memory, self.batch = self.llama.llama_get_memory(self.context), self.llama.llama_batch_init(BATCH, 0, 1)
        self.form = StateForm(spec, self.llama.llama_model_rope_type(model) == ROPE_NORM)

    def decode(self, ids: Sequence[int], start: int, sequence: int, wanted: int = 1) -> Tensor:
        """Logits after the last `wanted` of the ids, which stand at start and behind; [wanted, vocab_size]."""
        logits = []
        for first in range(0, len(ids), BATCH):
            part = ids[first : first + BATCH]
            self.batch.n_tokens = len(part)
            for row, token in enumerate(part):
                self.batch.token[row], self.batch.pos[row], self.batch.n_seq_id[row] = token, start + first + row, 1
                self.batch.seq_id[row][0], self.batch.logits[row] = sequence, first + row >= len(ids) - wanted
            if failed := self.llama.llama_decode(self.context, self.batch):
                raise self.llama.error(f"llama.cpp failed to decode (code {failed})")
            for row in range(max(0, len(ids) - wanted - first), len(part)):
                found = self.llama.llama_get_logits_ith(self.context, row)
                logits.append(torch.from_numpy(np.ctypeslib.as_array(found, (self.vocab_size,)).copy()))
        return torch.stack(logits)

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
        self,
        ids: Sequence[int],
        stored: tuple[np.ndarray, list[Chunk]],
        runs: list[Run],
        *,
        answer: Sequence[int] = (),
        corrected: bool = False,
    ) -> Tensor:
        """Logits after the prompt and after each token of the answer. Everything between the chunks' places is
        computed."""
        head, chunks = stored
        prefix = chunks[0].start
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
        if corrected:
            state = self.state(PROMPT)
            self.form.correct(state, chunks, prefix, runs)
            self.clear(PROMPT)
            self.load(state, PROMPT)
        return self.decode([*ids[chunks[-1].end :], *answer], chunks[-1].end, PROMPT, 1 + len(answer))

    def full(self, ids: Sequence[int], answer: Sequence[int] = ()) -> Tensor:
        self.clear(PROMPT)
        return self.decode([*ids, *answer], 0, PROMPT, 1 + len(answer))

    def answer(self, ids: Sequence[int]) -> list[int]:
        """The greedy answer of a full prefill, without its last token, which is fed to nobody."""
        found = [int(self.full(ids)[-1].argmax())]
        while len(found) < ANSWER - 1:
            found.append(int(self.decode(found[-1:], len(ids) + len(found) - 1, PROMPT)[-1].argmax()))
        return found


@dataclass(frozen=True)
class StateForm:
    """Where a state (see `engine/connectors/llama_cpp/state.py`) has its rows. interleaved: RoPE turns channels
    2i and 2i + 1."""

    spec: ModelSpec
    interleaved: bool

    def rows(self, state: np.ndarray) -> tuple[Tensor, list[np.ndarray]]:
        """Positions of the cells, int64 [cells]; K of each layer, then V of each: views of the state, fp16 [cells,
        width]."""
        width, (cells,) = self.spec.num_kv_heads * self.spec.head_dim, struct.unpack_from("<I", state.tobytes(), 12)
        positions = state[16 : 16 + 12 * cells].view("<i4").reshape(cells, 3)[:, 0].astype(np.int64)
        header = struct.pack("<iQ", 1, 2 * width)
        first, size = state.tobytes().find(header, 16 + 12 * cells), 2 * width * cells
        starts = [first + len(header) + i * (len(header) + size) for i in range(2 * self.spec.num_layers)]
        return torch.from_numpy(positions), [
            state[at : at + size].view(np.float16).reshape(cells, width) for at in starts
        ]

    def turned(self, k: Tensor, positions: Tensor, sign: int) -> Tensor:
        """Rotate K [n, width] by RoPE to these positions (sign 1), or back from them (-1)."""
        heads, dim = k.view(len(k), -1, self.spec.head_dim), self.spec.head_dim
        angle = positions[:, None] * self.spec.rope["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angle.cos()[:, None], sign * angle.sin()[:, None]
        pairs = heads.unflatten(-1, (-1, 2)) if self.interleaved else heads.unflatten(-1, (2, -1)).mT
        a, b = pairs.unbind(-1)
        moved = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
        return (moved if self.interleaved else moved.mT).reshape(len(k), -1)

    def correct(self, state: np.ndarray, chunks: list[Chunk], prefix: int, runs: list[Run]) -> None:
        """Move the tokens of each chunk that no run recomputed, in the state."""
        positions, new = self.rows(state)
        place = {int(position): cell for cell, position in enumerate(positions)}
        fresh = {position for start, end in runs for position in range(start, end)}
        layers, count = self.spec.num_layers, 0
        sums = torch.zeros(layers, self.spec.num_kv_heads * self.spec.head_dim)  # of K's changes of the chunks so far
        for chunk in chunks[1:]:
            here = torch.arange(chunk.start, chunk.end)
            known = torch.tensor([int(position) in fresh for position in here])
            if not known.any() or known.all():
                continue
            cells = torch.tensor([place[int(position)] for position in here])
            there, stored = self.rows(chunk.state)
            rows = torch.tensor([int((there == prefix + i).nonzero()) for i in range(len(here))])
            count += int(known.sum())
            for layer in range(layers):
                old_k, old_v = (torch.from_numpy(stored[i][rows].astype(np.float32)) for i in (layer, layers + layer))
                new_k, new_v = (torch.from_numpy(new[i][cells].astype(np.float32)) for i in (layer, layers + layer))
                old = torch.cat((self.turned(old_k, there[rows], -1), old_v), -1)
                change = (torch.cat((self.turned(new_k, here, -1), new_v), -1) - old)[known]
                followed = change.clone()
                of_k = followed.chunk(2, -1)[0]
                sums[layer] += of_k.sum(0)
                of_k -= (1 - COMMON) * sums[layer] / count
                moved = regress(old, change, followed, known)
                k, v = moved.chunk(2, -1)
                stale = cells[~known].numpy()
                new[layer][stale] = self.turned(k, here, 1)[~known].numpy()
                new[layers + layer][stale] = v[~known].numpy()


def regress(old: Tensor, change: Tensor, followed: Tensor, known: Tensor) -> Tensor:
    """Move a chunk's rows [n, K and V] as `blend.corrections.Regression` does, from the part of the known ones' change
    that is followed, with one kernel for K and V."""
    apart = old - old.mean(0)
    halves = apart.unflatten(-1, (2, -1))
    squares = halves.square().sum(-1)
    unit = squares.mean(0).clamp_min(1e-30)
    parts = zip(halves.unbind(1), unit, strict=True)
    distance = torch.stack([torch.cdist(h[known], h).square() / (2 * u) for h, u in parts]).sum(0)
    offset = torch.arange(len(old))
    steps = (offset[known, None] - offset).abs()
    near = sum(torch.exp(-steps / length) for length in LENGTHS)
    alike = torch.exp(-distance) + CHUNK + NEAR * near
    sizes = change.square().sum(-1)[None]
    noise = torch.diag_embed(_noise(sizes, torch.full(sizes.shape, 1 / len(old))))
    lower = torch.linalg.cholesky(alike[None, :, known] + noise)
    return old + alike.mT @ _solved(lower, followed[None])[0]


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


def asked(engine: Engine, store: ChunkStore, sample: Sample, blend: BlendParams, verify: bool = False) -> Answer:
    """cacheblend's own answer, which says what it chose. The chunks are stored by the first one."""
    documents = tuple(TextDocument(context.text, context.title) for context in sample.contexts)
    sampling = SamplingParams(max_tokens=ANSWER if verify else 1, ignore_eos=True)  # verify compares as many tokens
    request = AskRequest(sample.question, (), blend, sampling, documents=documents)
    return engine.run_alone(store, request, AskOptions(verify=verify))


@dataclass(frozen=True)
class Prompt:
    """A question's prompt, and the runs of each way to choose them."""

    ids: list[int]
    spans: list[Run]
    runs: dict[str, list[Run]]
    own_kl: float | None

    @classmethod
    def of(cls, engine: Engine, store: ChunkStore, sample: Sample, given: argparse.Namespace) -> Prompt:
        ratio, blocks = given.ratio, [int(block) for block in given.blocks.split(",")]
        asked(engine, store, sample, BlendParams(ratio=ratio))
        default = asked(engine, store, sample, BlendParams(ratio=ratio), verify=not given.times)
        assert default.chosen, "nothing is blended"
        spans = [(chunk.start, chunk.start + chunk.tokens) for chunk in default.chunks]
        runs: dict[str, list[Run]] = {"reuse": [], "first of chunk": beginnings(spans, ratio)}
        for block in blocks:
            chosen = asked(engine, store, sample, BlendParams(ratio=ratio, block=block)).chosen
            runs[f"spread, {block}"], runs[f"query, {block}"] = spread(spans, block, ratio), runs_of(chosen)
        own = None if default.verify is None else default.verify.answer_kl
        return cls(list(default.prompt_ids), spans, runs, own)


@dataclass
class Measured:
    """Of each question: the full prefill's seconds over blending's, and KL, without --times."""

    sooner: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)


def measure(alone: Alone, prompt: Prompt, ways: dict[Way, Measured], *, times: bool) -> None:
    """Add a question to the figures of every way."""
    stored = alone.collect(prompt.ids, prompt.spans[0][0], prompt.spans)
    answer = [] if times else alone.answer(prompt.ids)
    start = time.perf_counter()
    logits = alone.full(prompt.ids, answer)
    full_s = time.perf_counter() - start
    expected = logits.log_softmax(-1)
    for (name, corrected), found in ways.items():
        start = time.perf_counter()
        logits = alone.blend(prompt.ids, stored, prompt.runs[name], answer=answer, corrected=corrected)
        found.sooner.append(full_s / (time.perf_counter() - start))
        if not times:
            found.kl.append(float((expected.exp() * (expected - logits.log_softmax(-1))).sum(-1).mean()))
    each = {
        f"{name}{', corrected' * corrected}": [x[-1] for x in (m.sooner, m.kl) if x]
        for (name, corrected), m in ways.items()
    }
    print(
        json.dumps({"tokens": len(prompt.ids), "full_s": full_s, "own_kl": prompt.own_kl, "sooner, kl": each}),
        file=sys.stderr,
        flush=True,
    )


def table(own: list[float], ways: dict[Way, Measured]) -> list[str]:
    lines = [
        "| recomputed | corrected | sooner than full | KL mean | median | beside our default's mean |",
        "|---|---|---|---|---|---|",
    ]
    if own:
        lines.append(f"| cacheblend's default | | | {statistics.mean(own):.4f} | {statistics.median(own):.4f} | 1 x |")
    for (name, corrected), found in ways.items():
        cells = [name, "yes" if corrected else "", f"{statistics.median(found.sooner):.1f} x", "", "", ""]
        if found.kl:
            mean = statistics.mean(found.kl)
            cells[3:] = f"{mean:.4f}", f"{statistics.median(found.kl):.4f}", f"{mean / statistics.mean(own):.1f} x"
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict(own: list[float], ways: dict[Way, Measured]) -> str:
    """Return which ways are worth building, by the rule."""
    if not own:
        return "Times only: the weights are random."
    good = [
        f"{name}{', corrected' * corrected}"
        for (name, corrected), found in ways.items()
        if statistics.median(found.sooner) >= SOONER and statistics.mean(found.kl) <= NEAR_ENOUGH * statistics.mean(own)
    ]
    rule = f"Wanted: {SOONER:g} x sooner than its full prefill at a mean KL of at most {NEAR_ENOUGH:g} x the default's."
    return f"{rule} {'; '.join(good) if good else 'None of these'} {'meet' if len(good) != 1 else 'meets'} it."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--blocks", default="8,16,32")
    parser.add_argument("--times", action="store_true")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-study-") as folder,
        ChunkStore.open(Path(folder) / "store", mode="write") as store,
        Engine.load(EngineConfig(given.model, decode_with="torch")) as engine,
    ):
        if engine.model.spec.rope["rope_type"] != "default":
            parser.error(f"{given.model}: only plain RoPE is turned back here")
        samples = musique(given.data, given.passages)[1::2][: given.questions]
        prompts = [Prompt.of(engine, store, sample, given) for sample in samples]
        file, spec = given.file or engine.model.shown_path, engine.model.spec
    longest = max(len(prompt.ids) for prompt in prompts)
    alone = Alone(file, spec, longest + ANSWER + 64, torch.get_num_threads())
    names = prompts[0].runs
    ways = {
        (name, corrected): Measured()
        for name in names
        for corrected in (False, True)
        if name != "reuse" or not corrected
    }
    for prompt in prompts:
        measure(alone, prompt, ways, times=given.times)
    own = [prompt.own_kl for prompt in prompts if prompt.own_kl is not None]
    tokens = round(statistics.mean(len(prompt.ids) for prompt in prompts))
    settings = f"{file.name}, {alone.llama.name}; {len(prompts)} questions of {tokens:,} tokens in the mean, ratio {given.ratio:g}; "
    machine = f"{torch.get_num_threads()} threads of {cpu_name()}."
    print(
        "\n".join(
            [
                "# Blending by llama.cpp alone",
                "",
                INTRODUCTION,
                "",
                settings + machine,
                "",
                *table(own, ways),
                "",
                verdict(own, ways),
            ]
        )
    )


if __name__ == "__main__":
    main()
