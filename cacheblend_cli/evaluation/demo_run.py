"""The demo: the same questions answered by full prefill, plain reuse and blending, over chunks computed alone."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cacheblend_store import ChunkStore

from cacheblend_cli.collect.events import PrecomputeReport
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.demo import CHUNK_TOKENS, handbook_dir, questions
from cacheblend_cli.demo.records import SEED, DemoQuestion, record_pages
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.model.named import HANDBOOK, SMOLLM2, smollm2_file
from cacheblend_cli.types import Answer, AskRequest, BlendParams, SamplingParams

FULL, REUSE, BLENDED = "full prefill", "plain reuse", "blended"
ANSWER_TOKENS = 24
_HANDBOOK_DOCUMENTS = 3  # a prompt


@dataclass(frozen=True)
class DemoCase:
    """Model, documents by name, and questions of a demo."""

    model: str
    documents: Mapping[str, str]
    questions: Sequence[DemoQuestion]
    chunk_tokens: int = 512


def demo_case(seed: int = SEED) -> DemoCase:
    """Return records for SmolLM2 if it is installed, else the handbook for the bundled model. seed: of the records."""
    return _handbook_case() if smollm2_file() is None else DemoCase(SMOLLM2, *record_pages(seed))


def _handbook_case() -> DemoCase:
    """Return questions whose answer is in a paragraph that does not name the person, over pages in a different order
    each."""
    documents = {page.name: page.read_text(encoding="utf-8") for page in sorted(handbook_dir().glob("*.md"))}
    asked = []
    for item in filter(lambda item: item.across, questions()):
        own, rng = Path(item.source).name, random.Random(item.question)
        names = [own, *rng.sample([name for name in documents if name != own], _HANDBOOK_DOCUMENTS - 1)]
        rng.shuffle(names)
        [answer] = re.findall(r" is (?:a )?(.+)\.$", item.answer)
        asked.append(DemoQuestion(item.question, answer, tuple(names)))
    return DemoCase(HANDBOOK, documents, asked, CHUNK_TOKENS)


@dataclass(frozen=True)
class Compared:
    """Answers to one question by setting."""

    question: DemoQuestion
    answers: Mapping[str, Answer]

    def is_right(self, setting: str) -> bool:
        """Return whether the answer contains the expected text and nothing from another record, such as another
        product's designer."""
        text = self.answers[setting].text
        return _has(text, self.question.answer) and not any(_has(text, words) for words in self.question.wrong)

    def is_same(self, setting: str) -> bool:
        """Return whether the answer equals full prefill's, token for token."""
        return self.answers[setting].generated_ids == self.answers[FULL].generated_ids

    @property
    def is_repaired(self) -> bool:
        """Return whether plain reuse is wrong while full prefill and blending are right."""
        return self.is_right(FULL) and self.is_right(BLENDED) and not self.is_right(REUSE)


def _has(text: str, words: str) -> bool:
    return re.search(rf"\b{re.escape(words)}\b", text, re.IGNORECASE) is not None


@dataclass(frozen=True)
class DemoRow:
    """A setting over all questions. kept: correct answers to the questions that full prefill answers correctly. same:
    answers equal to full prefill's, token for token. ttft_s: median time to the first token."""

    setting: str
    questions: int
    correct: int
    kept: int
    same: int
    recompute_fraction: float
    ttft_s: float


class Demo:
    """A case and the store with its documents. ratio_from: see engine/profile.py; "" for the default."""

    def __init__(self, engine: Engine, store: ChunkStore, case: DemoCase) -> None:
        self._engine, self._store, self._case = engine, store, case
        self._keys: dict[str, list[bytes]] = {}
        blended, source = engine.own_blend(BlendParams())
        self.ratio_from = source if source.startswith("model: ") else ""
        if not self.ratio_from:
            blended = BlendParams()
        self.settings = {FULL: BlendParams(mode="full"), REUSE: BlendParams(mode="reuse"), BLENDED: blended}

    def precompute_alone(self) -> PrecomputeReport:
        """Write the documents into a folder beside the store, and store the KV of each of their chunks, computed
        without the chunks before it."""
        folder = self._store.path.with_name("documents")
        folder.mkdir()
        for name, text in self._case.documents.items():
            (folder / name).write_text(text, encoding="utf-8")
        options = PrecomputeOptions(chunk_tokens=self._case.chunk_tokens, context="sink")
        report = self._engine.precompute(self._store, [str(folder)], options, lambda event: None)
        for chunk in sorted(self._store.chunks(), key=lambda chunk: chunk.index):
            self._keys.setdefault(Path(chunk.source).name, []).append(chunk.key)
        return report

    def compare(self, count: int) -> Iterator[Compared]:
        """Answer the first `count` questions by every setting, one at a time."""
        for question in self._case.questions[:count]:
            answers = {}
            for setting, blend in self.settings.items():
                keys = [key for name in question.documents for key in self._keys[name]]
                ask = AskRequest(question.question, keys, blend, SamplingParams(max_tokens=ANSWER_TOKENS))
                answers[setting] = self._engine.run_alone(self._store, ask)
            yield Compared(question, answers)


def summarise(results: Sequence[Compared]) -> list[DemoRow]:
    return [
        DemoRow(
            setting,
            len(results),
            sum(result.is_right(setting) for result in results),
            sum(result.is_right(setting) and result.is_right(FULL) for result in results),
            sum(result.is_same(setting) for result in results),
            sum(result.answers[setting].recompute_fraction for result in results) / len(results),
            median(result.answers[setting].timing.ttft_s for result in results),
        )
        for setting in results[0].answers
    ]
