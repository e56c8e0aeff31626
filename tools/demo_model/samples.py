"""Training samples: documents, then many questions that do not see each other, with the targets of the auxiliary
losses.

Every piece is tokenised by itself (prefix, each chunk, each question), as `cacheblend ask` puts a prompt together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model import world

SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
PREFIX = "<s><|user|>\nDocuments:\n\n"
SUFFIX = "\n\nQuestion: {question}<|end|>\n<|assistant|>\n"


@dataclass
class Sample:
    """Flat token lists. block: 0 for the documents, i > 0 for the i-th question, which sees block 0 and itself."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    loss_weight: list[float] = field(default_factory=list)  # weight of predicting THIS token
    subject: list[int] = field(default_factory=list)  # first piece of the subject's last name, or -100
    look_at: list[int] = field(default_factory=list)  # where the value's token stands in the documents, or -1
    copy_of: list[int] = field(default_factory=list)  # where the name's token stands in the question, or -1


@dataclass(frozen=True)
class Batch:
    """ids, positions, block, subject, look_at, copy_of: [batch, length] int64; loss_weight: [batch, length] fp32."""

    ids: Tensor
    positions: Tensor
    block: Tensor
    loss_weight: Tensor
    subject: Tensor
    look_at: Tensor
    copy_of: Tensor


class SampleMaker:
    """Draws samples of at most `length` tokens with everything in them drawn anew."""

    def __init__(self, tokenizer: Tokenizer, length: int, seed: int) -> None:
        self.tokenizer, self.length, self.rng = tokenizer, length, random.Random(seed)
        self._cache: dict[str, tuple[list[int], list[tuple[int, int]]]] = {}

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def batch(self, size: int, pages: tuple[int, int], paragraphs: tuple[int, int]) -> Batch:
        samples = [self.sample(self.rng.randint(*pages), paragraphs) for _ in range(size)]

        def stack(name: str, fill: float, dtype: torch.dtype) -> Tensor:
            rows = [getattr(s, name) for s in samples]
            return torch.tensor([row + [fill] * (self.length - len(row)) for row in rows], dtype=dtype)

        return Batch(
            stack("ids", 0, torch.int64),
            stack("positions", 0, torch.int64),
            stack("block", -1, torch.int64),
            stack("loss_weight", 0, torch.float32),
            stack("subject", -100, torch.int64),
            stack("look_at", -1, torch.int64),
            stack("copy_of", -1, torch.int64),
        )

    def sample(self, num_pages: int, paragraphs: tuple[int, int]) -> Sample:
        rng, out, taken = self.rng, Sample(), set()
        ids, _ = self.encode(PREFIX)
        self._extend(out, ids, range(len(ids)), 0, 0.0)
        values: dict[tuple[str, str], list[int]] = {}
        asked: list[tuple[world.Person, world.Fact]] = []
        for _ in range(num_pages):
            person = world.make_person(rng, taken, "train")
            page = world.make_page(rng, person, rng.randint(*paragraphs))
            if len(out.ids) + 55 * len(page.paragraphs) > self.length - 120:
                break
            self._add_page(out, page, values)
            asked += [(person, fact) for fact in page.facts]
        rng.shuffle(asked)
        asked.sort(key=lambda item: sum(f.relation == item[1].relation for _, f in asked) < 2)  # ambiguous ones first
        start = len(out.ids)
        for block, (person, fact) in enumerate(asked, 1):
            if not self._add_question(out, person, fact, values[person.name, fact.relation], start, block):
                break
        return out

    def _extend(self, out: Sample, ids: list[int], positions: range, block: int, weight: float) -> None:
        out.ids += ids
        out.positions += positions
        out.block += [block] * len(ids)
        out.loss_weight += [weight] * len(ids)
        out.subject += [-100] * len(ids)
        out.look_at += [-1] * len(ids)
        out.copy_of += [-1] * len(ids)

    def _add_page(self, out: Sample, page: world.Page, values: dict[tuple[str, str], list[int]]) -> None:
        subject = self.encode(" " + page.person.last)[0][0]
        for text, paragraph in zip(page.chunk_texts(), page.paragraphs, strict=True):
            ids, offsets = self.encode(text)
            base = len(out.ids)
            self._extend(out, ids, range(base, base + len(ids)), 0, 0.1)
            at = len(text) - len(text.split("\n\n", 1)[1]) if text.startswith("#") else 0
            for sentence in paragraph:
                end = at + len(sentence.text)
                for i, (a, b) in enumerate(offsets):
                    if sentence.about and b > at and a < end:
                        out.subject[base + i] = subject
                if sentence.value_at >= 0:
                    start = at + sentence.value_at
                    found = [base + i for i in _within(offsets, start, sentence.value)]
                    values[page.person.name, sentence.relation] = found
                at = end + 1

    def _add_question(
        self, out: Sample, person: world.Person, fact: world.Fact, value_at: list[int], start: int, block: int
    ) -> bool:
        question, answer, at = world.ask(self.rng, person, fact)
        suffix_text = SUFFIX.format(question=question)
        suffix, suffix_offsets = self.encode(suffix_text)
        ids, offsets = self.encode(answer)
        end, _ = self.encode("<|end|>")
        if len(out.ids) + len(suffix) + len(ids) + 1 > self.length:
            return False
        self._extend(out, suffix, range(start, start + len(suffix)), block, 0.0)
        question_base, base = len(out.ids) - len(suffix), len(out.ids)
        position = start + len(suffix)
        self._extend(out, ids + end, range(position, position + len(ids) + 1), block, 1.0)
        subject = self.encode(" " + person.last)[0][0]
        found = _within(offsets, at, fact.value)
        for i in range(len(ids)):
            out.subject[base + i] = subject
        for i, target in zip(found, value_at, strict=False):
            out.look_at[base + i] = target
        asked = _within(suffix_offsets, suffix_text.index(person.name), person.name)
        for i, j in zip(_within(offsets, answer.index(person.name), person.name), asked, strict=True):
            out.copy_of[base + i] = question_base + j
        return True


def _within(offsets: list[tuple[int, int]], start: int, text: str) -> list[int]:
    """Return indexes of the tokens that overlap the characters start : start + len(text)."""
    return [i for i, (a, b) in enumerate(offsets) if b > start and a < start + len(text)]
