"""How well `--max-risk` tells which answers differ from a full prefill's: the figures of docs/gate.md.

    python benchmarks/gate.py --records FILE [--data musique_dev.json] [--words 100] [--minutes 25]
    python benchmarks/gate.py --report                              # draw again from benchmarks/results/gate.json

Each prompt is answered over blended KV, and a full prefill says of every token whether it would have said another behind the
same ones. The risk is fitted on the questions with even numbers and reported on the others. --records keeps what is measured,
and a later run goes on from there; --minutes ends a run early, and what is there is reported.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from contexts import hardware
from torch import Tensor

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig, SamplingParams
from cacheblend_cli.engine.decode import DecodeRunner
from cacheblend_cli.engine.fidelity import teacher_forced
from cacheblend_cli.engine.generate import Continuation, generate
from cacheblend_cli.engine.prefill import Prefilled, prefill
from cacheblend_cli.engine.request import Question, Request, resolve
from cacheblend_cli.engine.risk import fit_risk, signals_of
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.demo_table import spellable_samples
from cacheblend_cli.evaluation.risk import answer_risks
from cacheblend_cli.evaluation.samples import Context, Sample, read_samples
from cacheblend_cli.kv.pool import PagedSequence

ROOT = Path(__file__).parent.parent
OUT, PAGE = ROOT / "benchmarks/results/gate.json", ROOT / "docs/gate.md"
SETTINGS = {
    "query .15, regression": BlendConfig(selector="query", ratio=0.15, correction="regression"),
    "query .15": BlendConfig(selector="query", ratio=0.15, correction="none"),
    "random:2+draft .15, shifted": BlendConfig(selector="random:2+draft", ratio=0.15, correction="mean-shift"),
    "random:2+draft .30, shifted": BlendConfig(selector="random:2+draft", ratio=0.30, correction="mean-shift"),
}
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
"""Of the answers that fall back, where the curve is read."""
AIM = 0.7  # of the answers that differ


@dataclass(frozen=True)
class Answered:
    """An answer over blended KV: its tokens' signals, and which of them a full prefill would not have said."""

    question: int
    signals: Tensor
    differs: list[bool]


class Noting:
    """Decodes as the runner does, and keeps the logits."""

    def __init__(self, runner: DecodeRunner, first: Tensor) -> None:
        self._runner, self.logits = runner, [first.clone()]

    def begin(self, sequences: list[PagedSequence], kv_lens: list[int], room: int) -> None:
        self._runner.begin(sequences, kv_lens, room)

    def step(self, tokens: Tensor) -> Tensor:
        logits = self._runner.step(tokens)
        self.logits.append(logits[0].clone())
        return logits


@torch.inference_mode()
def answer(runtime: Runtime, request: Request, full: Prefilled, question: int) -> Answered:
    done = prefill(runtime, request, room=request.sampling.max_tokens)
    try:
        noting = Noting(runtime.decode_runner(done.pool), done.logits)
        ids = generate(runtime, Continuation.of(done), request.sampling, runner=noting, ahead=False).token_ids
    finally:
        done.sequence.release()
    ours = torch.stack(noting.logits[: len(ids)])
    theirs = teacher_forced(runtime.decoder, full.sequence, full.plan.token_ids, ids)
    said = torch.tensor(ids, device=theirs.device)
    return Answered(question, signals_of(ours), (theirs.argmax(-1) != said).tolist())


def prompts(name: str, data: Path | None, words: int) -> list[tuple[int, Sample]]:
    """(number of the question, its prompt). Of MuSiQue's ten contexts the first four, and then the next four."""
    if name == "handbook":
        return list(enumerate(spellable_samples()))
    assert data is not None
    samples = read_samples(data)
    cut = [tuple(Context(" ".join(c.text.split()[:words])) for c in s.contexts) for s in samples]
    return [(n, replace(s, contexts=cut[n][part : part + 4])) for part in (0, 4) for n, s in enumerate(samples)]


def measure(name: str, args: argparse.Namespace) -> Iterator[tuple[str, Answered]]:
    """(setting, an answer), from the records and then measured."""
    path = Path(f"{args.records}.{name}")
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        for label, (signals, differs) in row["found"].items():
            yield label, Answered(row["question"], torch.tensor(signals, dtype=torch.float64), differs)
    model, max_tokens = ("handbook", 24) if name == "handbook" else (args.model, 16)
    engine = Engine.load(EngineConfig(model=model, dtype="float32"))
    todo = prompts(name, args.data, args.words)[len(rows) :][: args.limit]
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        chunks = SampleChunks(engine, store)
        for number, sample in todo:
            if time.monotonic() > end:
                return
            chunks.store([sample], ["sink"])
            keys = chunks.keys(sample, "sink")
            question = Question(sample.question, keys, sampling=SamplingParams(max_tokens=max_tokens))
            request = resolve(engine.runtime, store, question)
            full = prefill(engine.runtime, request.in_full(), room=max_tokens)
            found = {
                label: answer(engine.runtime, replace(request, blend=blend), full, number)
                for label, blend in SETTINGS.items()
                if args.only in label
            }
            full.sequence.release()
            store.remove_chunks(keys)
            plain = {label: (a.signals.tolist(), a.differs) for label, a in found.items()}
            with path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"question": number, "tokens": full.plan.num_tokens, "found": plain}) + "\n")
            yield from found.items()


def figures(answers: list[Answered]) -> dict[str, Any]:
    """Of the questions with odd numbers, by a fit on those with even ones."""
    fit = fit_risk([(a.signals, a.differs) for a in answers if a.question % 2 == 0])
    tested = [a for a in answers if a.question % 2]
    risks = [answer_risks(fit.of_tokens(a.signals)) for a in tested]
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
        "fitted": fit.answers,
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


def write_page(result: dict[str, Any]) -> None:
    """Put the tables between the page's marks."""
    machine = "{cpu}, {cores} cores ({threads} thread(s) used), torch {torch}".format(**result["hardware"])
    lines = [f"{machine}; answers of {result['about']}.", ""]
    lines += ["| set | setting | differ | ceiling | " + " | ".join(f"{s:.0%}" for s in SHARES) + " | 70 % need |"]
    lines += ["|" + "---|" * (5 + len(SHARES))]
    for name, settings in result["sets"].items():
        for label, f in settings.items():
            cells = [f"{p['held']:.0%} / {p['streamed']:.0%}" for p in f["curve"]]
            most = next(p["most"] for p in f["curve"] if p["share"] == 0.2)
            told = [name, label, f"{f['differ']} of {f['tested']}", f"{most:.0%}", *cells, f"{f['share_for_aim']:.0%}"]
            lines.append("| " + " | ".join(told) + " |")
    lines += ["", "| set | setting | " + " | ".join(("below .1", ".1 to .3", ".3 to .6", "above .6")) + " | all |"]
    lines += ["|" + "---|" * 7]
    for name, settings in result["sets"].items():
        for label, f in settings.items():
            cells = [f"{b['foreseen']:.1f} / {b['differ']} of {b['answers']}" for b in f["calibration"]]
            lines.append(
                f"| {name} | {label} | {' | '.join(cells)} | {f['foreseen']:.1f} / {f['differ']} of {f['tested']} |"
            )
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition("<!-- curve -->\n")
    _, _, after = rest.partition("<!-- end -->")
    PAGE.write_text(f"{before}<!-- curve -->\n\n" + "\n".join(lines) + f"\n\n<!-- end -->{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", help="where answers are kept; a set's name is put behind it")
    parser.add_argument("--data", type=Path, help="MuSiQue's questions; without it the handbook's alone")
    parser.add_argument("--model", default="smollm2", help="for --data")
    parser.add_argument("--words", type=int, default=400, help="of each of MuSiQue's contexts")
    parser.add_argument("--minutes", type=float, default=600.0, help="of measuring a set, at most")
    parser.add_argument("--limit", type=int, help="prompts of a set, at most")
    parser.add_argument(
        "--only", default="", help="settings whose label has this; what the records have of others is kept"
    )
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if not args.report:
        if not args.records:
            parser.error("--records FILE is needed")
        result: dict[str, Any] = {
            "hardware": hardware(),
            "about": "24 tokens (handbook)"
            + (f" and 16 (MuSiQue, {args.words} words of each of 4 contexts, {args.model})" if args.data else "")
            + ", fp32, greedy, chunks collected alone",
            "sets": {},
        }
        for name in ("handbook", *(["musique"] if args.data else [])):
            answers: dict[str, list[Answered]] = {label: [] for label in SETTINGS}
            for label, found in measure(name, args):
                answers[label].append(found)
            result["sets"][name] = {label: figures(found) for label, found in answers.items() if found}
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    write_page(json.loads(OUT.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
