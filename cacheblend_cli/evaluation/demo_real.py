"""The demo's second part: a real model over real text, the same question answered in full and blended."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path

from cacheblend_store import ChunkStore

from cacheblend_cli.api import Answer, BlendConfig, Engine, Question, SamplingParams
from cacheblend_cli.engine.config import AskOptions

MODULES = ("copy", "heapq", "statistics", "struct")
"""Modules of Python whose documentation is read: some 2,000 tokens, and there wherever Python is."""
QUESTION = "What does the statistics module provide?"
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Pair:
    """The answers to one question: full prefill, and blending with its comparison to it (`verify`)."""

    full: Answer
    blended: Answer

    @property
    def times_sooner(self) -> float:
        return self.full.timing.ttft_s / self.blended.timing.ttft_s

    @property
    def agreeing(self) -> int:
        """Tokens of full prefill's answer that blending would have chosen too, each behind the same tokens."""
        assert self.blended.verify is not None
        return round(self.blended.verify.answer_top1 * self.blended.verify.answer_tokens)


def write_documents(folder: Path) -> list[Path]:
    """The modules' own documentation, a Markdown file each."""
    files = []
    for name in MODULES:
        text = importlib.import_module(name).__doc__ or ""  # none with python -OO
        files.append(folder / f"{name}.md")
        files[-1].write_text(f"# Python's module {name}\n\n{text.strip()}\n", encoding="utf-8")
    return files


def ask_both(engine: Engine, store: ChunkStore) -> Pair:
    """Answer the question over all chunks, document by document. A first token of each way comes before, unmeasured."""
    keys = [m.key for m in sorted(store.chunks(), key=lambda m: (m.source, m.index))]
    question = Question(QUESTION, keys, BlendConfig(), SamplingParams(max_tokens=ANSWER_TOKENS))
    full = replace(question, blend=BlendConfig(mode="full"))
    for warm_up in (question, full):
        engine.ask(store, replace(warm_up, sampling=SamplingParams(max_tokens=1)))
    return Pair(engine.ask(store, full), engine.ask(store, question, AskOptions(verify=True)))
