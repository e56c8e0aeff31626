"""The demo: the same questions by full prefill, plain reuse and blending, over chunks that were computed alone."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cacheblend_store import ChunkStore

from cacheblend_cli.collect.precompute import PrecomputeOptions, PrecomputeReport
from cacheblend_cli.demo import CHUNK_TOKENS, DemoQuestion, handbook_dir, office_dir, office_questions, questions
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.model.named import HANDBOOK, SMOLLM2, smollm2_file
from cacheblend_cli.types import Answer, AskOptions, AskRequest, BlendParams, SamplingParams

FULL, REUSE, BLENDED = "full prefill", "plain reuse", "blended"
SETTINGS = {FULL: BlendParams(mode="full"), REUSE: BlendParams(mode="reuse"), BLENDED: BlendParams()}
ANSWER_TOKENS = 20


@dataclass(frozen=True)
class DemoCase:
    """Model, documents and questions of a demo. num_documents: documents in each prompt, None for all."""

    model: str
    folder: Path
    questions: Sequence[DemoQuestion]
    chunk_tokens: int = 512
    num_documents: int | None = None


def demo_case() -> DemoCase:
    """Return the case for SmolLM2 if it is installed, else for the bundled model."""
    if smollm2_file() is not None:
        return DemoCase(SMOLLM2, office_dir(), office_questions())
    across = [q for q in questions() if q.across]
    return DemoCase(HANDBOOK, handbook_dir(), across, CHUNK_TOKENS, 3)


@dataclass(frozen=True)
class Compared:
    """Answers to one question by setting."""

    question: DemoQuestion
    answers: Mapping[str, Answer]

    def is_right(self, setting: str) -> bool:
        """Return whether the answer contains the expected words."""
        expected = re.findall(r" is (?:a )?(.+)\.$", self.question.answer) or [self.question.answer]
        return re.search(rf"\b{re.escape(expected[0])}\b", self.answers[setting].text, re.IGNORECASE) is not None

    @property
    def is_repaired(self) -> bool:
        """Return whether plain reuse is wrong and blending is right."""
        return self.is_right(BLENDED) and not self.is_right(REUSE)

    @property
    def first_difference(self) -> int | None:
        """Index of the first token at which the blended answer differs from full prefill's; None if it does not."""
        full, blended = self.answers[FULL].generated_ids, self.answers[BLENDED].generated_ids
        pairs = zip([*full, None], [*blended, None], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


@dataclass(frozen=True)
class DemoRow:
    """A setting over all questions. ttft_s: median seconds to the first token."""

    setting: str
    questions: int
    correct: int
    ttft_s: float
    recompute_fraction: float


def precompute_alone(engine: Engine, store: ChunkStore, case: DemoCase) -> PrecomputeReport:
    """Store the KV of every chunk of the documents, each computed without the chunks before it."""
    options = PrecomputeOptions(chunk_tokens=case.chunk_tokens, context="sink")
    return engine.precompute(store, [str(case.folder)], options, lambda event: None)


def compare(engine: Engine, store: ChunkStore, case: DemoCase, count: int, *, verify: bool) -> Iterator[Compared]:
    """Answer the first `count` questions by every setting, over documents in an order of each question's own.

    verify: compare blended answers with a full prefill, teacher-forced (Answer.verify).
    """
    documents: dict[str, list[tuple[int, bytes]]] = {}
    for chunk in store.chunks():
        documents.setdefault(Path(chunk.source).name, []).append((chunk.index, chunk.key))
    warm_up = True
    for question in case.questions[:count]:
        keys = [key for name in _prompt(question, sorted(documents), case) for _, key in sorted(documents[name])]
        answers = {}
        for setting, blend in SETTINGS.items():
            asked = AskRequest(question.question, keys, blend, SamplingParams(max_tokens=ANSWER_TOKENS))
            if warm_up:
                engine.run_alone(store, AskRequest(question.question, keys, blend, SamplingParams(max_tokens=1)))
            answers[setting] = engine.run_alone(store, asked, AskOptions(verify=verify and setting == BLENDED))
        warm_up = False
        yield Compared(question, answers)


def _prompt(question: DemoQuestion, names: Sequence[str], case: DemoCase) -> list[str]:
    """Shuffled names of the documents of a question's prompt, the one with the answer among them."""
    shuffled = random.Random(question.question).sample(names, len(names))
    own = Path(question.source).name
    others = [name for name in shuffled if name != own][: (case.num_documents or len(names)) - 1]
    return [name for name in shuffled if name == own or name in others]


def summarise(results: Sequence[Compared]) -> list[DemoRow]:
    """Return a row for each setting."""
    rows = []
    for setting in SETTINGS:
        answers = [result.answers[setting] for result in results]
        rows.append(
            DemoRow(
                setting,
                len(results),
                sum(result.is_right(setting) for result in results),
                median(answer.timing.ttft_s for answer in answers),
                sum(answer.recompute_fraction for answer in answers) / len(answers),
            )
        )
    return rows
