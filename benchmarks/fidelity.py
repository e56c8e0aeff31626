"""How far blended answers are from a full prefill's, on real text with a real model: the study behind docs/fidelity.md.

    python benchmarks/fidelity.py --data FOLDER [--records FILE] [--set NAME] [--only WORD] [--questions N] [--seconds S]
    python benchmarks/fidelity.py --data FOLDER --quick       # ten minutes on two cores
    python benchmarks/fidelity.py --data FOLDER --time        # of what --out holds: the first token, on a quiet machine
    python benchmarks/fidelity.py --report                    # draw the page again from the committed result

FOLDER holds musique_dev.json and rag/*.json; fidelity_sets.py says what is made of them. Every setting is measured on every
question of a set's test half (odd places) against one full prefill of the same token ids; --half fit is for choosing.
--records keeps what is measured and goes on from it, also after another method was added; --seconds ends a run early.
--time measures no distance: it adds to the result, made before, how long each method of the wide table takes to its first token.
Writes benchmarks/results/fidelity.json, and the tables and plot of docs/fidelity.md, or those of another --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from contexts import hardware
from fidelity_report import write_report
from fidelity_sets import read_sets
from fidelity_times import first_tokens
from fidelity_variants import further_settings
from published import published_settings

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig
from cacheblend_cli.evaluation.bootstrap import Bootstrap, mean
from cacheblend_cli.evaluation.evaluate import FULL, EvaluateOptions, Results, evaluate
from cacheblend_cli.evaluation.records import RecordFile
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.evaluation.summary import summarise

ROOT = Path(__file__).parent.parent
OUT, PAGE = ROOT / "benchmarks/results/fidelity.json", ROOT / "docs/fidelity.md"
TOKENS, OWN_TOKENS = 64, 16
"""Of full prefill's answer, over which the distributions are compared; of a setting's own answer."""
RATIOS = (0.05, 0.10, 0.15, 0.30)
REUSE = Setting("reuse", BlendConfig(mode="reuse"))
QUESTIONS = {
    "musique": 12,
    "needles-2k": 8,
    "pages": 8,
    "tracking-2k": 6,
    "needles-7k": 3,
    "musique-10": 7,
    "rag": 2,
    "tracking-7k": 1,
}
"""Of each set's test half, in the order of what is measured first."""
WIDE = ("musique",)  # sets that every method is measured on, at every ratio
NARROW_RATIOS = (0.05, 0.15)
TIMED_ROUNDS = 3
KEPT = ("label", "samples", "top1", "kl", "kl_first", "same_answer", "f1", "exact_match", "k_error", "ratio", "recomputed", "budget")  # fmt: skip


class TimeIsUp(Exception):
    """--seconds have passed."""


def over(ratios: Iterable[float], name: str, selector: str, context: str = "sink", **config: Any) -> list[Setting]:
    config = {"correction": "none", **config}
    return [Setting(f"{name} {r:g}", BlendConfig(selector=selector, ratio=r, **config), context) for r in ratios]


def leading(ratios: Sequence[float], context: str = "sink") -> list[Setting]:
    """What is measured on every set."""
    return [
        Setting("reuse", BlendConfig(mode="reuse"), context),
        *over(ratios, "hkvd", "hkvd", context),
        *over(ratios, "query", "query", context),
        *over(ratios, "random:2+draft, shifted", "random:2+draft", context, correction="mean-shift"),
        *over(ratios, "query, regression", "query", context, correction="regression"),
    ]


def wide(ratios: Sequence[float]) -> list[Setting]:
    """What is measured beside them where chunks are of different documents."""
    shifted: dict[str, Any] = {"correction": "mean-shift"}
    return [
        *published_settings(ratios),
        *over(ratios, "random", "random"),
        *over(ratios, "perturb", "perturb"),
        *over(ratios, "draft", "draft"),
        *over(ratios, "random, shifted", "random", **shifted),
        *over(ratios, "query, shifted", "query", **shifted),
        *over(ratios, "draft, shifted", "draft", **shifted),
        *over(ratios, "random:2+draft, regression", "random:2+draft", correction="regression"),
        # 15 % of the work, for the first of four chunks is exact:
        *over([0.20], "query, regression", "query", correction="regression"),
        *further_settings(),
    ]


def settings_of(name: str, only: Sequence[str]) -> list[Setting]:
    """What is measured on a set. only: methods whose name contains one of these words."""
    found = leading(RATIOS if name in WIDE else NARROW_RATIOS, "document" if name == "pages" else "sink")
    if name in WIDE:
        found += wide(RATIOS)
    return [s for s in found if s.label == "reuse" or not only or any(word in s.label for word in only)]


def measure(
    engine: Engine, samples: list[Sample], settings: list[Setting], records: RecordFile, until: float
) -> tuple[Results, int]:
    """The settings on as many of the samples as there is time for, and how many those are."""
    done = 0

    def progress(number: int, total: int, text: str) -> None:
        nonlocal done
        done = number
        print(f"  {number}/{total}", file=sys.stderr, flush=True)
        if number < total and time.monotonic() > until:
            raise TimeIsUp

    options = EvaluateOptions(TOKENS, records, keep_chunks=False, own_tokens=OWN_TOKENS)
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-fidelity-") as folder,
        ChunkStore.open(Path(folder) / "store", mode="write") as store,
    ):
        try:
            return evaluate(engine, store, samples, [FULL, *settings], options, progress), len(samples)
        except TimeIsUp:
            return evaluate(engine, store, samples[:done], [FULL, *settings], options), done


def summary(results: Results, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row a setting. kl_median: over the questions. found: share of the answers that hold a reference answer. likelihood: of
    the reference answer, nats a token."""
    bootstrap = Bootstrap(len(samples))
    rows = []
    for told in summarise(results, baseline=REUSE.label):
        records = results.by_label[told.label]
        found = [
            float(any(answer.lower() in record.answer.lower() for answer in sample.answers))
            for sample, record in zip(samples, records, strict=True)
        ]
        likelihood = [record.likelihood for record in records]
        answered = all(sample.answers for sample in samples)
        rows.append(
            {name: value for name, value in told.to_dict().items() if name in KEPT}
            | {
                "context": told.setting["context"],
                "kl_median": statistics.median(statistics.fmean(record.kl) for record in records) if told.kl else None,
                "found": asdict(interval) if answered and (interval := bootstrap.interval(mean, found)) else None,
                "likelihood": asdict(interval)
                if None not in likelihood and (interval := bootstrap.interval(mean, [x for x in likelihood if x is not None]))
                else None,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with musique_dev.json and rag/")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--set", action="append", default=[], choices=QUESTIONS, help="this set alone (repeatable)")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="methods with it in their name")
    parser.add_argument("--questions", type=int, help="of each set, instead of its own number")
    parser.add_argument("--half", choices=("fit", "test"), default="test")
    parser.add_argument("--quick", action="store_true", help="three questions of two sets, the leading methods")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no question after so long")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--records", type=Path, help="keep records here, and go on from them")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--time", action="store_true", help="add times to --out, of a question of each wide set")
    parser.add_argument("--report", action="store_true", help="write the page from --out again, measure nothing")
    arguments = parser.parse_args()
    page = PAGE if arguments.out == OUT else arguments.out.with_suffix(".md")
    if not arguments.report:
        if arguments.data is None:
            parser.error("give --data FOLDER, or --report")
        partly = arguments.quick or arguments.set or arguments.only or arguments.questions or arguments.half == "fit"
        if partly and arguments.out == OUT:
            parser.error("docs/fidelity.md is of all of it: give --out FILE.json")
        (add_times if arguments.time else run)(arguments)
    write_report(json.loads(arguments.out.read_text()), page)


def run(arguments: argparse.Namespace) -> None:
    """Measure, and write the result after every set."""
    until = time.monotonic() + arguments.seconds
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    engine = Engine.load(EngineConfig(model=arguments.model, dtype=arguments.dtype))
    sets = read_sets(arguments.data)
    result: dict[str, Any] = {
        "hardware": hardware(), "model": engine.model.name, "dtype": arguments.dtype, "half": arguments.half, "sets": {},
    }  # fmt: skip
    names = arguments.set or (["musique", "needles-2k"] if arguments.quick else list(QUESTIONS))
    with RecordFile(arguments.records) as records:
        for name in names:
            count = arguments.questions or (3 if arguments.quick else QUESTIONS[name])
            samples = sets[name]()[1 if arguments.half == "test" else 0 :: 2][:count]
            settings = leading(NARROW_RATIOS) if arguments.quick else settings_of(name, arguments.only)
            print(f"{name}: {len(samples)} questions, {len(settings)} settings", file=sys.stderr, flush=True)
            results, done = measure(engine, samples, settings, records, until)
            if done:
                result["sets"][name] = {"questions": done, "settings": summary(results, samples[:done])}
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def add_times(arguments: argparse.Namespace) -> None:
    """Put times to the first token beside the rows of the wide sets of a result. A later run of the study drops them."""
    result, until = json.loads(arguments.out.read_text()), time.monotonic() + arguments.seconds
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    engine = Engine.load(EngineConfig(model=result["model"], dtype=result["dtype"]))
    for name in [name for name in WIDE if name in result["sets"]]:
        found, sample = result["sets"][name], read_sets(arguments.data)[name]()[1]
        timed = first_tokens(engine, sample, settings_of(name, arguments.only), TIMED_ROUNDS, until)
        shares = timed.pop("shares")
        found["timed"] = {"hardware": hardware(), **timed}
        for row in found["settings"]:
            row["first_token"] = shares.get(row["label"])
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
