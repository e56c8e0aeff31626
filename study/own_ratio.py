"""Does a profile hold on questions that it was not made on? Results and the page: study/results/own_ratio.json,
study/own_ratio.md.

    python study/own_ratio.py --data FOLDER --work FOLDER --model smollm2 --made  # half of the passages
    python study/own_ratio.py --data FOLDER --work FOLDER --model smollm2 --held  # the other half
    python study/own_ratio.py --work FOLDER --report                                  # write the results and the page

FOLDER of --data has musique_dev.json. Each passage is a document, cut and collected alone (--context sink), as
`precompute` does it; prompts are what `ask` finds for the question. A measurement is kept as soon as it is made, and a
later run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import torch
from cacheblend_store import ChunkStore
from results import hardware, write_result

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine, Request
from cacheblend_cli.engine.profile import Distance, Profile
from cacheblend_cli.evaluation.bootstrap import Bootstrap, mean
from cacheblend_cli.evaluation.profile import (
    CORRECTIONS,
    PROMPTS,
    RATIOS,
    TOKENS,
    cut_requests,
    distance,
    full_answer,
    usable,
)  # fmt: skip
from cacheblend_cli.evaluation.samples import Sample, read_samples
from cacheblend_cli.settings import Settings
from cacheblend_cli.types import AskRequest, BlendParams, SearchParams

STUDY = Path(__file__).parent
QUESTIONS, PASSAGES, WORDS = 12, 2, 150
"""Of a half: questions whose first passages are stored, and the words of a passage that are."""
SIDES = ("made", "held")
COLUMNS = (
    "model", "ratio", "correction", "prompts", "made: mean", "median", "90th percentile", "questions", "held out: mean (95 %)", "median",
    "90th percentile",
)  # fmt: skip
PAGE = """# A ratio that each model earns

Does the ratio that `models check` chooses hold on questions it was not chosen on? The profile is made on questions cut from one half of MuSiQue's passages (*made*), and
checked on MuSiQue's own questions over the other half (*held out*); both are what `ask` finds, five chunks of about 200 tokens, each collected alone. KL(full prefill || blended)
in nats per token over {tokens} tokens of full prefill's answer, bfloat16; 95 % bootstrap intervals over the questions. Limits: mean .03, 90th percentile .08.
`python study/own_ratio.py` measures it; {hardware[cores]} cores of an Intel Xeon with AMX, torch {hardware[torch]}. It is written by that script.

{chosen}

The choice holds for SmolLM2. For Qwen and Gemma the mean over MuSiQue's questions at the chosen ratio is above the limit (for Gemma the interval contains it). So `--ratio model` is not
the default, and `models check --questions FILE` measures on real questions. Here only ratios of interest were measured, with regression alone.

A question is the first half of a sentence, and the chunk it was cut from is left out of the prompt. Tried before, ratio .05 and .15, four questions each: with the chunk left in
SmolLM2 .078 and .047, Qwen .012 and .003 (the model completes the sentence, which Qwen does well over any KV); the half sentence as "What do the documents say about ...?" with the chunk left in SmolLM2
.034 and .020; a question that the model itself was asked to write about the chunk: it mostly answers "not in the documents". On SmolLM2 regression at .02 is farther than no correction
(.21 and .11 over four prompts): a fit over few tokens.

All that was measured:

{every}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder of stores and measurements")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--ratio", type=float, action="append", help="measure this one (repeatable)")
    parser.add_argument("--correction", action="append", choices=CORRECTIONS)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="of CPU time, then stop after the measurement"
    )
    parser.add_argument("--made", action="store_true")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    for side in SIDES:
        if getattr(arguments, side):
            measure(arguments, side)
    if arguments.report:
        report(arguments.work)


def measure(arguments: argparse.Namespace, side: str) -> None:
    """Measure missing settings, question by question."""
    until = time.process_time() + arguments.seconds
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    engine = Engine.load(EngineConfig(model=arguments.model, dtype=arguments.dtype, threads=arguments.threads))
    name, samples = Path(arguments.model).stem, read_samples(arguments.data / "musique_dev.json")
    halves = {"made": samples[0::2], "held": samples[1::2]}
    folder = arguments.work / side
    write_passages(halves[side][:QUESTIONS], folder)
    records = arguments.work / f"{name}-{side}.jsonl"
    known = {(r["question"], r["ratio"], r["correction"]) for r in read(records)}
    settings = [(r, c) for r in arguments.ratio or RATIOS for c in arguments.correction or CORRECTIONS]
    with ChunkStore.open(arguments.work / f"{name}-{side}", mode="write") as store, records.open("a") as file:
        engine.precompute(store, [str(folder)], PrecomputeOptions(chunk_tokens=512, context="sink"), lambda event: None)
        for number, request in enumerate(requests(engine, store, halves[side], side)):
            missing = [s for s in settings if (request.question, *s) not in known]
            if number == arguments.questions or time.process_time() > until:
                return
            full = full_answer(engine, request) if missing else None
            for ratio, correction in missing:
                blend = BlendParams(ratio=ratio, correction=correction)
                assert full is not None
                record = {
                    "model": engine.model.name, "dtype": arguments.dtype, "side": side, "question": request.question, "ratio": ratio,
                    "correction": correction, "kl": distance(engine, replace(request, blend=blend), full),
                    "prompt_tokens": request.plan.num_tokens, "inexact_tokens": request.plan.inexact_tokens,
                }  # fmt: skip
                file.write(json.dumps(record) + "\n")
                file.flush()
                if time.process_time() > until:
                    return


def write_passages(samples: list[Sample], folder: Path) -> None:
    """Write each passage of the samples as a document."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = dict.fromkeys(context.text for sample in samples for context in sample.contexts[:PASSAGES])
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(" ".join(text.split()[:WORDS]), encoding="utf-8")


def requests(engine: Engine, store: ChunkStore, samples: list[Sample], side: str) -> Iterator[Request]:
    """Yield the prompts of a side: those that a profile is made on, or MuSiQue's questions."""
    ask = AskRequest("", search=SearchParams(by="words"))
    if side == "made":
        yield from usable(engine, cut_requests(engine, store, ask), PROMPTS)
    else:
        for sample in samples:
            yield engine.resolve(store, replace(ask, question=sample.question))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def report(work: Path) -> None:
    """Write the results of complete questions and the page."""
    models = list[dict[str, Any]]()
    for made in sorted(work.glob("*-made.jsonl")):
        sides = {side: by_setting(read(work / made.name.replace("-made", f"-{side}"))) for side in SIDES}
        first = read(made)[0]
        models.append({"model": Path(first["model"]).stem, "dtype": first["dtype"], **sides})
    result = {"hardware": hardware(), "tokens": TOKENS, "models": models}
    write_result(STUDY / "results" / "own_ratio.json", result)
    (STUDY / "own_ratio.md").write_text(page(result), encoding="utf-8")


def by_setting(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per setting with the KL of each question, in the order of the questions."""
    rows: dict[tuple[float, str], dict[str, float]] = {}
    for r in records:
        rows.setdefault((r["ratio"], r["correction"]), {})[r["question"]] = r["kl"]
    return [
        {"ratio": ratio, "correction": correction, "kl": [round(kl, 5) for kl in rows[ratio, correction].values()]}
        for ratio, correction in sorted(rows, key=lambda s: (s[0], s[1] == "none"))
    ]


def profile_of(rows: list[dict[str, Any]]) -> Profile:
    """Return the profile that `models check` makes of these measurements."""
    limits = Settings()
    found = tuple(Distance(row["ratio"], row["correction"], fmean(row["kl"]), p90(row["kl"])) for row in rows)
    return Profile({}, len(rows[0]["kl"]), limits.kl_mean, limits.kl_p90, found)


def p90(kl: list[float]) -> float:
    return quantiles(kl, n=10, method="inclusive")[-1]


def page(result: dict[str, Any]) -> str:
    """Return the page: each model's choice, how far it is on held-out questions, and all that was measured."""
    chosen, every = list[list[str]](), list[list[str]]()
    for model in result["models"]:
        profile, held = profile_of(model["made"]), {(r["ratio"], r["correction"]): r["kl"] for r in model["held"]}
        choice = profile.choice
        for found, row in zip(profile.measured, model["made"], strict=True):
            on_held = described(held.get((found.ratio, found.correction), []))
            setting = [model["model"], f"{found.ratio:g}", found.correction]
            every.append(
                [
                    *setting,
                    str(len(row["kl"])),
                    f"{found.mean:.3f}",
                    f"{median(row['kl']):.3f}",
                    f"{found.p90:.3f}",
                    *on_held,
                ]
            )
            if found == choice:
                chosen.append(every[-1])
        if choice is None:
            chosen.append([model["model"], "full prefill", *[""] * (len(COLUMNS) - 2)])
    return PAGE.format(chosen=table(chosen), every=table(every), **result)


def described(kl: list[float]) -> list[str]:
    """Return mean with interval, median and 90th percentile in words; nothing of nothing."""
    found = Bootstrap(len(kl)).interval(mean, kl)
    if found is None:
        return ["", "", "", ""]
    return [
        str(len(kl)),
        f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})",
        f"{median(kl):.3f}",
        f"{p90(kl):.3f}",
    ]


def table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (COLUMNS, ["---"] * len(COLUMNS), *rows))


if __name__ == "__main__":
    main()
