"""How well an estimate of the risk tells which answers differ from a full prefill's: the figures of study/gate.md.

Each prompt is answered over blended KV, and a full prefill says of every token whether it would have chosen another
after the same ones. The risk is a logistic regression over statistics of each token's distribution, fitted on questions
with even numbers and tested on those with odd ones. Versions up to 0.2.7 had it as `--max-risk`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import research  # noqa: F401  registers draft and mean-shift
import torch
from cacheblend_store import ChunkStore
from results import hardware
from sets import spellable_samples
from torch import Tensor

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine, Prefilled, Request
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.samples import Context, Sample, read_samples
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

SETS = {"gate-handbook": "handbook", "gate-musique": "smollm2"}
"""Each set, and its model."""
WORDS = 100  # of each MuSiQue passage
DEFAULT = "query .15, regression"
SETTINGS = {
    DEFAULT: BlendParams(selector="query", ratio=0.15, correction="regression"),
    "query .15": BlendParams(selector="query", ratio=0.15, correction="none"),
    "random:2+draft .15, shifted": BlendParams(selector="random:2+draft", ratio=0.15, correction="mean-shift"),
    "random:2+draft .30, shifted": BlendParams(selector="random:2+draft", ratio=0.30, correction="mean-shift"),
}
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
"""Shares of answers that fall back, at which the curve is read."""
AIM = 0.7  # share of the differing answers that is to be caught
RIDGE = 1.0
"""Penalty of a weight: half its square, in units of the log-likelihood. It keeps weights finite if the signals separate
the tokens completely."""


@dataclass(frozen=True)
class Answered:
    """An answer over blended KV: its tokens' signals, and which tokens a full prefill would have chosen differently."""

    question: int
    signals: Tensor
    differs: list[bool]


@torch.inference_mode()
def answer(engine: Engine, request: Request, full: Prefilled, question: int) -> Answered:
    logits = list[Tensor]()
    done = engine.hold_prefill(request, headroom=request.sampling.max_tokens)
    try:
        ids = done.answer(request.sampling, on_logits=lambda row: logits.append(row.clone())).token_ids
    finally:
        done.sequence.release()
    ours, theirs = torch.stack(logits), full.predict(ids)
    chosen = torch.tensor(ids, device=theirs.device)
    return Answered(question, signals_of(ours), (theirs.argmax(-1) != chosen).tolist())


def run(name: str, arguments: argparse.Namespace, until: float) -> dict[str, Any]:
    """Measure a set until time.monotonic() passes `until`; return the gate's result with this set replaced."""
    answers: dict[str, list[Answered]] = {label: [] for label in SETTINGS}
    arguments.records.mkdir(parents=True, exist_ok=True)
    for label, found in measure(name, arguments, until):
        answers[label].append(found)
    path = arguments.out / "gate.json"
    old = json.loads(path.read_text(encoding="utf-8"))["sets"] if path.exists() else {}
    tested = {label: figures(found) for label, found in answers.items() if found}
    return {
        "hardware": hardware(),
        "about": f"24 tokens (handbook) and 16 (MuSiQue, {WORDS} words of each of 4 passages), fp32, greedy, chunks collected alone",
        "sets": old | {name.removeprefix("gate-"): tested},
    }


def prompts(name: str, data: Path | None) -> list[tuple[int, Sample]]:
    """Return the number of each question and its prompt. Of MuSiQue's ten passages the first four, and then the next
    four."""
    if name == "gate-handbook":
        return list(enumerate(spellable_samples()))
    if data is None:
        return []
    samples = read_samples(data / "musique_dev.json")
    cut = [tuple(Context(" ".join(c.text.split()[:WORDS])) for c in s.contexts) for s in samples]
    return [(n, replace(s, contexts=cut[n][part : part + 4])) for part in (0, 4) for n, s in enumerate(samples)]


def measure(name: str, arguments: argparse.Namespace, until: float) -> Iterator[tuple[str, Answered]]:
    """Yield (setting, answer), first from the records and then measured."""
    path = arguments.records / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        for label, (signals, differs) in row["found"].items():
            yield label, Answered(row["question"], torch.tensor(signals, dtype=torch.float64), differs)
    todo = prompts(name, arguments.data)[: arguments.questions][len(rows) :]
    if not todo:
        return
    engine = Engine.load(EngineConfig(model=SETS[name], dtype="float32", kv_dtype="float32"))
    max_tokens = 24 if name == "gate-handbook" else 16
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        chunks = SampleChunks(engine, store)
        for number, sample in todo:
            if time.monotonic() > until:
                return
            chunks.store([sample], ["sink"])
            keys = chunks.keys(sample, "sink")
            question = AskRequest(sample.question, keys, sampling=SamplingParams(max_tokens=max_tokens))
            request = engine.resolve(store, question)
            full = engine.hold_prefill(request.in_full(), headroom=max_tokens)
            settings = SETTINGS if name == "gate-handbook" else {DEFAULT: SETTINGS[DEFAULT]}
            found = {
                label: answer(engine, replace(request, blend=blend), full, number) for label, blend in settings.items()
            }
            full.sequence.release()
            store.remove_chunks(keys)
            plain = {label: (a.signals.tolist(), a.differs) for label, a in found.items()}
            with path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"question": number, "found": plain}) + "\n")
            yield from found.items()


def signals_of(logits: Tensor) -> Tensor:
    """Return the features of each token, [num_tokens, 4] fp64 on the CPU: by how much the likeliest token leads the
    second in log-probability, the entropy in nats, and the square roots of both. logits: [num_tokens, vocab_size]."""
    found = torch.log_softmax(logits.float(), -1)
    first, second = found.topk(2).values.unbind(-1)
    entropy = -(found.exp() * found).sum(-1)
    known = torch.stack((first - second, entropy), -1).clamp_min(0)
    return torch.cat((known, known.sqrt()), -1).cpu().double()


def fit_risk(answers: Sequence[Answered]) -> Callable[[Tensor], Tensor]:
    """Fit by Newton's method. Return the function from tokens' signals to the probabilities that a full prefill prefers
    another token, [num_tokens] fp64."""
    x = torch.cat([a.signals for a in answers])
    y = torch.tensor([token for a in answers for token in a.differs], dtype=torch.float64)
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-9)
    x = torch.cat(((x - mean) / scale, torch.ones(len(x), 1, dtype=torch.float64)), 1)
    penalty = torch.tensor([RIDGE] * (x.shape[1] - 1) + [1e-6], dtype=torch.float64)
    w = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(50):
        p = torch.sigmoid(x @ w)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + torch.diag(penalty)
        step = torch.linalg.solve(hessian, x.T @ (p - y) + penalty * w)
        size = float(step.abs().max())
        w -= step * min(1.0, 2.0 / max(size, 1e-12))  # far from the optimum a whole step goes too far
        if size < 1e-9:
            break
    weights = w[:-1] / scale
    bias = w[-1] - weights @ mean
    return lambda signals: torch.sigmoid(signals @ weights + bias)


def figures(answers: list[Answered]) -> dict[str, Any]:
    """Return catch rates and calibration on odd questions, with a fit on even ones."""
    fitted, tested = ([a for a in answers if a.question % 2 == odd] for odd in (0, 1))
    risk = fit_risk(fitted)
    risks = [1 - (1 - risk(a.signals)).cumprod(0) for a in tested]  # up to and including each token
    whole = torch.tensor([float(r[-1]) for r in risks])
    differ = torch.tensor([any(a.differs) for a in tested])
    at_first = torch.tensor(
        [float(r[a.differs.index(True)] if any(a.differs) else r[-1]) for r, a in zip(risks, tested, strict=True)]
    )
    order, count = whole.argsort(descending=True), max(1, int(differ.sum()))
    curve = []
    for share in SHARES:
        first = order[: max(1, round(share * len(order)))]
        limit = whole[first[-1]]
        curve.append(
            {
                "share": share,
                "held": int(differ[first].sum()) / count,
                "streamed": int((differ & (at_first >= limit)).sum()) / count,
                "most": min(1.0, len(first) / count),
            }
        )
    found = differ[order].cumsum(0) / count
    bins = [(0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1.01)]
    inside = [(whole >= low) & (whole < high) for low, high in bins]
    return {
        "fitted": len(fitted),
        "tested": len(tested),
        "differ": int(differ.sum()),
        "foreseen": float(whole.sum()),
        "curve": curve,
        "share_for_aim": (int((found < AIM).sum()) + 1) / len(order),
        "calibration": [
            {
                "from": low,
                "to": min(high, 1.0),
                "answers": int(w.sum()),
                "foreseen": float(whole[w].sum()),
                "differ": int(differ[w].sum()),
            }
            for (low, high), w in zip(bins, inside, strict=True)
        ],
    }
