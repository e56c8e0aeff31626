"""Does a profile hold on questions that it was not made on? For study/own_ratio.md.

    python study/own_ratio.py --data FOLDER --work FOLDER --model smollm2 --text musique --side made --side held
    python study/own_ratio.py --work FOLDER --report              # write the results and the table

FOLDER of --data has musique_dev.json. Each passage of MuSiQue and each page of the office is a document, cut and
collected alone (--context sink), as `precompute` does it; prompts are what `ask` finds for the question. A measurement
is kept as soon as it is made, and a later run goes on from there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from questions import office
from report import write_pages
from results import hardware, write_result

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine, Request
from cacheblend_cli.evaluation.profile import (
    PROMPTS,
    RATIOS,
    TOKENS,
    distance,
    full_answer,
    general_requests,
    usable,
)  # fmt: skip
from cacheblend_cli.evaluation.samples import Sample, read_samples
from cacheblend_cli.types import AskRequest, BlendParams, SearchParams

STUDY = Path(__file__).parent
QUESTIONS, PASSAGES, WORDS = 12, 2, 150
"""Questions of MuSiQue's half whose first passages are stored, passages of each, and the words of a passage."""
SIDES, TEXTS = ("made", "held"), ("musique", "office")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder of stores and measurements")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--ratio", type=float, action="append", help="measure this one (repeatable)")
    parser.add_argument("--text", choices=TEXTS, action="append", default=[])
    parser.add_argument("--side", choices=SIDES, action="append", default=[])
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if arguments.side:
        measure(arguments)
    if arguments.report:
        report(arguments.work)


def measure(arguments: argparse.Namespace) -> None:
    """Measure missing ratios of every text and side, question by question."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    engine = Engine.load(EngineConfig(model=arguments.model, dtype=arguments.dtype, threads=arguments.threads))
    name, halves = Path(arguments.model).stem, {"office": office(orders=1), "made": [], "held": []}
    if "musique" in arguments.text:
        samples = read_samples(arguments.data / "musique_dev.json")
        halves |= {"made": samples[0::2], "held": samples[1::2]}
    for text in arguments.text:
        for side in arguments.side:
            # the office's pages are the same on both sides
            asked = halves["office" if text == "office" else side][: arguments.questions]
            stored = halves["office"][:1] if text == "office" else asked
            folder = arguments.work / f"{text}-{'all' if text == 'office' else side}"
            write_documents(stored, folder, PASSAGES if text == "musique" else None)
            with ChunkStore.open(arguments.work / f"{name}-{folder.name}", mode="write") as store:
                options = PrecomputeOptions(chunk_tokens=512, context="sink")
                engine.precompute(store, [str(folder)], options, lambda event: None)
                of = {"model": name, "dtype": arguments.dtype, "text": text, "side": side}
                prompts = requests(engine, store, asked, side)
                measure_side(engine, prompts, of, arguments.ratio or RATIOS, arguments.work / f"{name}.jsonl")


def measure_side(
    engine: Engine, prompts: Iterator[Request], of: dict[str, str], ratios: Sequence[float], path: Path
) -> None:
    """Add each prompt's KL at the ratios that are not in the file of records."""
    known = {(r["prompt"], r["ratio"]) for r in read(path) if of.items() <= r.items()}
    with path.open("a") as file:
        for number, request in enumerate(prompts):
            missing = [ratio for ratio in ratios if (number, ratio) not in known]
            full = full_answer(engine, request) if missing else None
            for ratio in missing:
                assert full is not None
                kl = distance(engine, replace(request, blend=BlendParams(ratio=ratio)), full)
                record = {
                    **of, "prompt": number, "question": request.question, "ratio": ratio, "kl": kl, "prompt_tokens": request.plan.num_tokens,
                    "inexact_tokens": request.plan.inexact_tokens,
                }  # fmt: skip
                file.write(json.dumps(record) + "\n")
                file.flush()


def write_documents(samples: Sequence[Sample], folder: Path, passages: int | None) -> None:
    """Write the first passages of the samples, each as a document."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = dict.fromkeys(context.text for sample in samples for context in sample.contexts[:passages])
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(" ".join(text.split()[:WORDS]), encoding="utf-8")


def requests(engine: Engine, store: ChunkStore, samples: Sequence[Sample], side: str) -> Iterator[Request]:
    """Yield the prompts of a side: those that a profile is made on, or the text's own questions."""
    ask = AskRequest("", search=SearchParams(by="words"))
    if side == "made":
        yield from usable(engine, general_requests(engine, store, ask), PROMPTS)
    else:
        asked = (engine.resolve(store, replace(ask, question=sample.question)) for sample in samples)
        yield from usable(engine, asked, len(samples))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def report(work: Path) -> None:
    """Write the results and the page's table."""
    models = list[dict[str, Any]]()
    for records in sorted(map(read, work.glob("*.jsonl")), key=lambda found: str(found[0]["model"])):
        for text in TEXTS:
            sides = {side: by_ratio([r for r in records if (r["text"], r["side"]) == (text, side)]) for side in SIDES}
            if sides["made"]:
                models.append({"model": records[0]["model"], "dtype": records[0]["dtype"], "text": text, **sides})
    result = {"hardware": hardware(), "tokens": TOKENS, "models": models}
    write_result(STUDY / "results" / "own_ratio.json", result)
    write_pages(STUDY / "results", [STUDY / "own_ratio.md"])


def by_ratio(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per ratio with the KL of each prompt, in their order."""
    rows: dict[float, dict[int, float]] = {}
    for r in records:
        rows.setdefault(r["ratio"], {})[r["prompt"]] = r["kl"]
    return [{"ratio": ratio, "kl": [round(rows[ratio][n], 5) for n in sorted(rows[ratio])]} for ratio in sorted(rows)]


if __name__ == "__main__":
    main()
