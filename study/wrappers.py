"""Train soft tokens around chunks, so that stored KV fits any context (KV Packet, arXiv 2604.13226): what `wrappers.md`
reports.

    python study/wrappers.py --data FOLDER --train "soft 8+8" --seconds 1200 --out RUN  # writes into RUN
    python study/wrappers.py --data FOLDER --shift 20 --out RUN        # nothing trained: a mean change

Every chunk is collected behind the prompt's prefix as [header][chunk][trailer]. The model is frozen; the soft tokens'
embeddings are trained by KL(full prefill of the prompt without wrappers || stored KV with wrappers, nothing recomputed)
over full prefill's own greedy answers. The MuSiQue questions in even places are trained on, without passages that are
also given with a question in an odd place, which are held out. Seconds are of the CPU. `wrapped.py` measures the result
in the engine.

Wrappers that RUN has are trained on from their averaged values, which are all that is kept: Adam's moments, the steps
and the lessons begin anew.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_llama import KV, Frozen
from wrapped_prompts import Prompts, Wrappers

from cacheblend_cli.evaluation.samples import Sample, read_samples
from cacheblend_cli.model.loading import resolve_model

COUNTS = (2, 3, 4)  # chunks of a prompt
HELD_OUT_LAYOUT, HELD_OUT_ANSWER = (4, 128), 64
ASKED = (
    "What do the documents say about {}?",
    "Who or what is {}?",
    "Summarise what is known about {}.",
    "What comes after {}?",
)


@dataclass(frozen=True)
class Lesson:
    """Chunks with questions, and full prefill's answers. target: its outputs that predict them, [num_questions,
    num_answer_tokens, hidden_size]; counts: which of them are not behind the answer's end, [num_questions,
    num_answer_tokens]."""

    chunks: list[list[int]]
    suffixes: list[tuple[int, ...]]
    answers: Tensor
    target: Tensor
    counts: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, prompts: Prompts, chunks: list[list[int]], questions: Sequence[str], length: int) -> Lesson:
        suffixes, past = [prompts.model.template.suffix_ids(q) for q in questions], prompts.whole(chunks)
        answers = prompts.answers(past, suffixes, length).clone()
        ended = (answers == prompts.end).int().cumsum(1)
        counts = F.pad(ended[:, :-1], (1, 0)) == 0
        return cls(chunks, suffixes, answers, prompts.hidden(past, suffixes, answers), counts)

    def kl(self, prompts: Prompts, past: KV) -> Tensor:
        """KL(full prefill || these chunks' KV), nats, [num_answer_tokens that count]."""
        hidden = prompts.hidden(past, self.suffixes, self.answers)[self.counts]
        ours, theirs = prompts.model.log_p(hidden), prompts.model.log_p(self.target[self.counts])
        return (theirs.exp() * (theirs - ours)).sum(-1)


class Lessons:
    """Lessons of the fit half: pieces of passages in ever new company, with questions of the set and questions about
    words in the pieces, four that share the chunks."""

    def __init__(
        self, prompts: Prompts, samples: Sequence[Sample], num_tokens: int, answer: int, seed: int = 0
    ) -> None:
        self._prompts, self._samples, self._random = prompts, samples, random.Random(seed)
        self._num_tokens, self._answer = num_tokens, answer
        self._ids: dict[str, list[int]] = {}

    def draw(self) -> Lesson:
        return Lesson.of(self._prompts, *self.draw_prompt(), self._answer)

    def draw_prompt(self) -> tuple[list[list[int]], list[str]]:
        """Chunks, and questions over them."""
        rng = self._random
        count = rng.choice(COUNTS)
        first, *others = rng.sample(self._samples, 3)
        contexts = rng.sample(first.contexts, min(2, count)) + rng.sample(
            [c for s in others for c in s.contexts], count - 2 if count > 2 else 0
        )
        rng.shuffle(contexts)
        whole = [self._encode(c.text) for c in contexts]
        length = min(self._num_tokens // count, *map(len, whole))
        pieces = [self._piece(ids, length) for ids in whole]
        words = [self._prompts.model.tokenizer.decode(piece).split() for piece in pieces]
        starts = [rng.randrange(max(1, len(of) - 3)) for of in words]
        asked = [rng.choice(ASKED).format(" ".join(of[at : at + 3])) for of, at in zip(words, starts, strict=True)]
        return pieces, [first.question, rng.choice(others).question, *rng.sample(asked, 2)]

    def _encode(self, text: str) -> list[int]:
        return self._ids.setdefault(text, self._prompts.model.tokenizer.encode_text(text))

    def _piece(self, ids: list[int], length: int) -> list[int]:
        start = 0 if self._random.random() < 0.5 else self._random.randint(0, len(ids) - length)
        return ids[start : start + length]


def halves(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Return the questions to train on, without passages of the held-out ones, and those; of the first only such with
    two passages left."""
    tests = list(samples[1::2])
    theirs = {c.text for sample in tests for c in sample.contexts}
    left = [replace(s, contexts=tuple(c for c in s.contexts if c.text not in theirs)) for s in samples[0::2]]
    return [s for s in left if len(s.contexts) >= 2], tests


def held_out(prompts: Prompts, samples: Sequence[Sample]) -> list[Lesson]:
    """Questions that are not trained on, each over the beginnings of its first passages."""
    count, length = HELD_OUT_LAYOUT
    encode = prompts.model.tokenizer.encode_text
    cut = [[encode(c.text)[:length] for c in s.contexts[:count]] for s in samples]
    return [Lesson.of(prompts, chunks, [s.question], HELD_OUT_ANSWER) for chunks, s in zip(cut, samples, strict=True)]


@torch.no_grad()
def distances(prompts: Prompts, lessons: Sequence[Lesson], wrappers: Wrappers | None) -> list[float]:
    """Mean KL of each lesson."""
    return [float(one.kl(prompts, prompts.stored(one.chunks, wrappers)).mean()) for one in lessons]


class Trained:
    """Wrappers in training. average: of their values over about the last ten steps, which is what is measured and
    kept."""

    def __init__(self, wrappers: Wrappers, rate: float, deep_rate: float) -> None:
        self.wrappers, self.average, self.losses = wrappers, copy.deepcopy(wrappers), list[float]()
        rates = {"header": deep_rate if wrappers.is_deep else rate, "trailer": rate}
        groups = [{"params": [p], "lr": rates[name]} for name, p in wrappers.named_parameters() if p.numel()]
        self._optimiser = torch.optim.Adam(groups, betas=(0.9, 0.98))
        self.step = 0

    def learn(self, prompts: Prompts, lessons: Sequence[Lesson]) -> None:
        """Take one step of Adam."""
        self._optimiser.zero_grad()
        for lesson in lessons:
            loss = lesson.kl(prompts, prompts.stored(lesson.chunks, self.wrappers)).mean() / len(lessons)
            loss.backward()
            self.losses.append(float(loss.detach()) * len(lessons))
        for group in self._optimiser.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        self._optimiser.step()
        self.step += 1
        with torch.no_grad():
            for kept, new in zip(self.average.parameters(), self.wrappers.parameters(), strict=True):
                kept.lerp_(new, 1 / min(self.step + 1, 10))


def variants(prompts: Prompts) -> dict[str, Wrappers]:
    """Return what can be trained, by name, as it begins: line feeds."""
    line = prompts.model.tokenizer.encode_text("\n")

    def soft(header: int, trailer: int) -> Wrappers:
        return Wrappers.of_ids(prompts.model, line * header, line * trailer)

    return {
        "soft 8+8": soft(8, 8),
        "soft 8+0": soft(8, 0),
        "soft 0+8": soft(0, 8),
        "deep 8+0": prompts.deepened(soft(8, 0)),
        "deep 8+8": prompts.deepened(soft(8, 8)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with musique_dev.json")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--train", action="append", default=[], metavar="NAME", help="a variant, such as 'soft 8+8' (repeatable)"
    )
    parser.add_argument(
        "--shift",
        type=int,
        default=0,
        metavar="PROMPTS",
        help="train nothing: add these prompts' mean change to stored KV",
    )
    parser.add_argument("--seconds", type=float, help="of the CPU, with --train (1200)")
    parser.add_argument("--rate", type=float, default=5e-3, help="of embeddings")
    parser.add_argument("--deep-rate", type=float, default=1e-2, help="of a deep header's K and V")
    parser.add_argument("--pool", type=int, default=200, help="lessons that recur")
    parser.add_argument("--batch", type=int, default=1, help="lessons of a step")
    parser.add_argument(
        "--tokens", type=int, default=340, help="of a lesson's chunks together; 2080 for whole passages"
    )
    parser.add_argument("--answer", type=int, default=16, help="tokens of full prefill's answers")
    parser.add_argument("--held-out", type=int, default=6, help="questions of the curve")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--every", type=int, default=25, help="steps between two looks at the held-out questions")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder of the log and the wrappers; training begins at the averaged values of those in it",
    )
    arguments = parser.parse_args()
    if arguments.seconds is not None and not arguments.train:
        parser.error("--seconds is for --train NAME")
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_default_device(arguments.device)
    path = resolve_model(arguments.model)
    with torch.no_grad():
        prompts = Prompts(Frozen(path, getattr(torch, arguments.dtype)))
        begun = variants(prompts)
    samples = read_samples(arguments.data / "musique_dev.json")
    learned, unseen = halves(samples)
    tests = held_out(prompts, unseen[: arguments.held_out])
    lessons = Lessons(prompts, learned, arguments.tokens, arguments.answer)

    def note(**fields: object) -> None:
        line = json.dumps({"cpu_s": round(time.process_time(), 1), **fields})
        print(line, flush=True)
        with (arguments.out / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    note(name="reuse", step=0, held_out=distances(prompts, tests, None))
    if arguments.shift:
        change = torch.stack([prompts.change(lessons.draw_prompt()[0]) for _ in range(arguments.shift)]).mean(0)
        moved = [float(one.kl(prompts, prompts.shifted(one.chunks, change)).mean()) for one in tests]
        note(name=f"mean change of {arguments.shift} prompts", held_out=moved)
        return
    trained, seconds = dict[str, Trained](), arguments.seconds or 1200
    for name in arguments.train:
        kept = file_of(arguments.out, name)
        one = trained[name] = Trained(
            Wrappers.load(kept) if kept.exists() else begun[name], arguments.rate, arguments.deep_rate
        )
        note(name=name, step=0, held_out=distances(prompts, tests, one.average))
    known, begin = list[Lesson](), time.process_time()
    for step in itertools.count() if trained else ():
        while len(known) < min((step + 1) * arguments.batch, arguments.pool):
            known.append(lessons.draw())
        over = time.process_time() - begin > seconds
        for name, one in trained.items():
            one.learn(prompts, [known[(step * arguments.batch + i) % len(known)] for i in range(arguments.batch)])
            if (step + 1) % arguments.every == 0 or over:
                loss = sum(one.losses) / len(one.losses)
                one.losses.clear()
                note(name=name, step=step + 1, loss=loss, held_out=distances(prompts, tests, one.average))
                one.average.save(file_of(arguments.out, name))
        if over:
            break


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-')}.safetensors"


if __name__ == "__main__":
    main()
