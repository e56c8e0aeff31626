"""A hybrid at the shape of Qwen3.5-0.8B with random weights: time to the first token of a full prefill, of a prompt
whose documents are restored, and of transformers; decoding; and the numbers beside transformers'."""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from gpu.bench import BLOCK_SIZE, FULL, TINY
from gpu.checks import row_error
from gpu.context import Cases, Context, Rows
from gpu.end_to_end import LOGITS_TOLERANCE, THEIRS
from gpu.model import read_config
from torch import Tensor

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.demo import handbook_dir, model_dir
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.types import AskOptions, AskRequest, BlendParams, SamplingParams

SMALL: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "vocab_size": 2048, "max_position_embeddings": 512,
}  # fmt: skip
NARROW = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 2048}
"""A few layers and small products, with the heads of the whole model."""
CHUNK_TOKENS, QUESTION = 512, "What does the keeper of the harbor say about the light, and who told her of the storm?"
DOCUMENTS = {"one document": 1, "five documents": 5}
FULL_CASE = "full"


def cases(context: Context) -> Cases:
    with context.slow("model"):
        bench = HybridBench(context)
    with bench.store:
        with context.slow("precompute"):
            stored = bench.collect()
        yield "precompute", lambda: iter([("load", stored)])
        for case in (FULL_CASE, *DOCUMENTS):
            yield case, partial(bench.times, case)
        yield "numbers", bench.checks
        yield "decode", bench.decode
        yield THEIRS, bench.theirs


def write_random(path: Path, name: str, shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Write a checkpoint of random weights in the shape of a configuration of configs/, and return transformers' model
    of it. shape: other fields."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = read_config(name) | shape
    config = AutoConfig.for_model(fields["model_type"], **{k: v for k, v in fields.items() if k != "model_type"})
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(model_dir() / file, path / file)
    return model.eval()


def write_documents(folder: Path, count: int, tokens: int) -> None:
    """Write documents of so many tokens in all, of the handbook's words."""
    folder.mkdir(parents=True)
    words = " ".join(page.read_text() for page in sorted(handbook_dir().glob("*.md"))).split()
    tokenizer, rng = Tokenizer(model_dir(), 1 << 20), random.Random(0)
    for number in range(count):
        ids = tokenizer.encode_text(" ".join(rng.choices(words, k=2 * tokens)))[: tokens // count]
        (folder / f"{number}.md").write_text(tokenizer.decode(ids) + "\n")


class HybridBench:
    """An engine, transformers' model over the same weights, and a store of the same tokens in one document and in
    five."""

    def __init__(self, context: Context) -> None:
        self.device, self.scenario = context.device, TINY if context.tiny else FULL
        self.folder, self.tokens = context.folder / context.step, self.scenario.lengths[0]
        shape = SMALL if context.tiny else {}
        self.twin = write_random(self.folder / "model", context.step, shape, self.device, self.scenario.dtype)
        config = EngineConfig(
            model=str(self.folder / "model"), device=str(self.device), block_size=BLOCK_SIZE, speculate="off",
            dtype=self.scenario.dtype_name, gpu_memory_utilization=0.5,
        )  # fmt: skip
        self.engine = Engine.load(config)
        self.store = ChunkStore.open(self.folder / "store", mode="write")

    def collect(self) -> dict[str, Any]:
        start = time.perf_counter()
        for name, count in DOCUMENTS.items():
            write_documents(self.folder / name, count, self.tokens - self.scenario.suffix)
            options = PrecomputeOptions(chunk_tokens=CHUNK_TOKENS if self.tokens > CHUNK_TOKENS else 40)
            self.engine.precompute(self.store, [str(self.folder / name)], options, lambda event: None)
        seconds = time.perf_counter() - start
        chunks = [m for m in self.store.chunks() if m.context != "prefix"]
        tokens, size = sum(m.num_tokens for m in chunks), sum(m.num_bytes for m in chunks)
        row = {"length": self.tokens, "case": "precompute", "tokens": tokens, "bytes": size, "seconds": seconds}
        return {**row, "tokens_per_s": tokens / seconds, "codec": self.engine.runtime.collection().codec}

    def asked(self, case: str, **sampling: Any) -> AskRequest:
        folder = "one document" if case == FULL_CASE else case
        chunks = [m for m in self.store.chunks() if m.context != "prefix" and Path(m.source).parent.name == folder]
        keys = [m.key for m in sorted(chunks, key=lambda m: (m.source, m.index))]
        blend = BlendParams(mode="full") if case == FULL_CASE else BlendParams()
        return AskRequest(QUESTION, keys, blend, SamplingParams(**({"max_tokens": 1} | sampling)))

    def request(self, case: str) -> Request:
        return resolve(self.engine.runtime, self.store, self.asked(case))

    def logits(self, case: str) -> Tensor:
        done = prefill(self.engine.runtime, self.request(case))
        done.sequence.release()
        return done.result.logits[-1:]

    def times(self, case: str) -> Rows:
        def run() -> float:
            start = time.perf_counter()
            self.logits(case).argmax().item()
            return time.perf_counter() - start

        plan = self.request(case).plan
        yield "times", {**self._timed(case, plan.num_tokens, run), "restored": plan.stored_until}

    def _timed(self, case: str, length: int, run: Callable[[], float]) -> dict[str, Any]:
        first, *others = (run() for _ in range(1 + self.scenario.reps))
        row = {"length": self.tokens, "case": case, "prompt_tokens": length, "seconds": statistics.median(others)}
        return {**row, "first_run_s": first}

    @torch.inference_mode()
    def theirs(self) -> Rows:
        prompt = torch.tensor([self.request(FULL_CASE).plan.token_ids], device=self.device)

        def run() -> float:
            start = time.perf_counter()
            self.twin(prompt, use_cache=True, logits_to_keep=1).logits[0, -1].argmax().item()
            return time.perf_counter() - start

        yield "times", self._timed(THEIRS, prompt.shape[1], run)

    @torch.inference_mode()
    def checks(self) -> Rows:
        full, plan = self.logits(FULL_CASE), self.request(FULL_CASE).plan
        prompt = torch.tensor([plan.token_ids], device=self.device)
        theirs = self.twin(prompt, logits_to_keep=1).logits[0]
        for name, error in {
            "full prefill beside transformers": row_error(full, theirs),
            "restored beside full prefill": row_error(self.logits("one document"), full),
        }.items():
            tolerance = LOGITS_TOLERANCE[self.scenario.dtype]
            row = {"kernel": "whole path", "case": f"qwen3.5-0.8b N={self.tokens} {name}", "tolerance": tolerance}
            row |= {"dtype": self.scenario.dtype_name, "error": error, "ok": error <= tolerance}
            yield "checks", {**row, "backend": self.engine.model.decoder.kernels.name}

    def decode(self) -> Rows:
        steps = self.scenario.decode_steps
        asked = self.asked("one document", max_tokens=1 + steps, ignore_eos=True)
        answer = self.engine.run_alone(self.store, asked, AskOptions(save=False))
        speed = answer.timing.decode_tokens_per_s
        row = {"length": self.tokens, "case": "batch 1", "first_token_s": answer.timing.ttft_s, "tokens": steps}
        yield "decode", {**row, "tokens_per_s": speed, "step_s": 1 / speed}
