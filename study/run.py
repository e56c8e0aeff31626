"""Measure how far blended answers are from a full prefill's: the study behind study/*.md.

    python study/run.py --data FOLDER                                     # everything; resumes
    python study/run.py --data FOLDER --quick --out /tmp/quick            # three questions of two sets, ten minutes
    python study/run.py --data FOLDER --main --questions 100 --set musique --dtype bfloat16 --out /tmp/evidence
    python study/run.py --report                                          # write the tables again, measure nothing

FOLDER has musique_dev.json and rag/*.json; without --data only the handbook's sets are measured. Every setting is
compared with one full prefill of the same token ids. Each measurement is kept in a file of records as soon as it is
made, and a later run goes on from there, also after a setting or questions were added: each version of the correction
(results.py) has a folder of records. After each set, and when --seconds are over or the run is interrupted, the results
of the questions that are complete are written to OUT/SET.json and, for study/results, into the pages.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from answer_scores import contains_reference, first_lines, parts_of
from cacheblend_store import ChunkStore
from report import PAGES, write_pages
from results import (
    CORRECTION,
    first_tokens,
    hardware,
    rows_of,
    write_result,
)
from sets import StudySet, study_sets
from settings import DEFAULT, REGRESSION, main_settings, over

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.evaluate import FULL, EvaluateOptions, Results, evaluate
from cacheblend_cli.evaluation.records import RecordFile
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.evaluation.settings import Setting

STUDY = Path(__file__).parent
RESULTS, RECORDS = STUDY / "results", STUDY / "records"
QUICK = ("musique", "needles-2k")
TIMED = "musique"


class TimeIsUp(Exception):
    """Raised between questions after --seconds."""


@dataclass(frozen=True)
class Run:
    """A set's engine, samples and settings, and where its records are kept."""

    study_set: StudySet
    engine: Engine
    samples: list[Sample]
    settings: list[Setting]
    records: Path

    def measure(self, until: float) -> tuple[Results, int]:
        """Measure all questions, or until the one that is measured when time.monotonic() passes `until`, or Ctrl-C.
        Returns the results and the number of complete questions."""
        done, known = 0, 0

        def progress(number: int, total: int, text: str) -> None:
            nonlocal done, known
            done = number
            if len(records) > known and time.monotonic() > until and number < total:
                raise TimeIsUp
            if len(records) > known or number in (0, total):
                print(f"  {number}/{total}", file=sys.stderr, flush=True)
            known = len(records)

        wanted = [FULL, *self.settings]
        self.records.parent.mkdir(parents=True, exist_ok=True)
        with (
            RecordFile(self.records) as records,
            tempfile.TemporaryDirectory(prefix="cacheblend-study-") as folder,
            ChunkStore.open(Path(folder) / "store", mode="write") as store,
        ):
            known = start = len(records)
            begin = time.monotonic()
            options = EvaluateOptions(self.study_set.tokens, records, False, None, self.study_set.own_tokens)
            try:
                results, done = evaluate(self.engine, store, self.samples, wanted, options, progress), len(self.samples)
            except (TimeIsUp, KeyboardInterrupt):
                results = evaluate(self.engine, store, self.samples[:done], wanted, options)
            if measured := len(records) - start:
                seconds = (time.monotonic() - begin) / measured
                print(f"  {measured} measurements, {seconds:.2f} s each", file=sys.stderr)
            return results, done


def main() -> None:
    sets = study_sets()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with musique_dev.json and rag/")
    parser.add_argument("--set", action="append", choices=[*sets], help="this set alone (repeatable)")
    parser.add_argument("--main", action="store_true", help="the settings that claims are made of, at .05, .15 and .30")
    parser.add_argument("--ratio", type=float, action="append", default=[], help="the default at this ratio, too")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="settings with it in their name")
    parser.add_argument("--questions", type=int, help="per set, instead of the set's own number")
    parser.add_argument("--half", choices=("fit", "test"), default="test", help="which half of the questions (test)")
    parser.add_argument("--quick", action="store_true", help="three questions of two sets")
    parser.add_argument("--model", help="instead of the set's own")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-dtype", help="format of stored KV (exact)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after the question that is being measured then"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of measurements to go on from")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (study/results)")
    parser.add_argument("--time", action="store_true", help=f"add times to the first token to OUT/{TIMED}.json")
    parser.add_argument("--report", action="store_true", help="write the pages again from OUT, measure nothing")
    arguments = parser.parse_args()
    changed = (
        arguments.quick or arguments.main or arguments.only or arguments.questions or arguments.model or arguments.ratio
    )
    changed = changed or arguments.kv_dtype
    if arguments.out == RESULTS and (changed or arguments.half == "fit" or arguments.dtype != "float32"):
        parser.error("study/results is for the study as it is: give --out FOLDER")
    arguments.records /= CORRECTION
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.time:
        add_times(arguments, sets[TIMED])
    elif not arguments.report:
        run(arguments, sets)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_pages(arguments.out, PAGES if arguments.out == RESULTS else [arguments.out / "report.md"])


def run(arguments: argparse.Namespace, sets: dict[str, StudySet]) -> None:
    """Measure the chosen sets and write a result after each."""
    until = time.monotonic() + arguments.seconds
    names = arguments.set or (QUICK if arguments.quick else [*sets])
    for name in names:
        if sets[name].needs_data and arguments.data is None:
            print(f"{name} needs --data FOLDER", file=sys.stderr)
            continue
        one = prepare(name, sets[name], arguments)
        print(f"{name}: {len(one.samples)} questions, {len(one.settings)} settings", file=sys.stderr, flush=True)
        results, done = one.measure(until)
        for number, why in results.skipped:
            print(f"  question {number} was skipped: {why}", file=sys.stderr)
        left = [s for number, s in enumerate(one.samples[:done], 1) if number not in dict(results.skipped)]
        if left:
            about = {
                "set": name, "model": Path(one.engine.model.name).stem, "dtype": arguments.dtype, "half": half_of(one.study_set, arguments),
                "hardware": hardware(), "questions": len(left), "tokens": one.study_set.tokens, "kv_dtype": one.engine.config.kv_dtype,
            }  # fmt: skip
            if one.study_set.answerable:
                about["asked"] = len(left)
                results, left = answerable(results, left)
                about["questions"] = len(left)
            if one.study_set.by_part:
                results = first_lines(results, left)
                about["parts"] = parts_of(results, left)
            rows = rows_of(results, left, one.study_set.measures)
            write_result(arguments.out / f"{name}.json", about | {"rows": rows})


def answerable(results: Results, samples: list[Sample]) -> tuple[Results, list[Sample]]:
    """Keep the questions that full prefill answers at least in part: with a reference in its answer, or words of
    one."""
    pairs = enumerate(zip(samples, results.full, strict=True))
    kept = [i for i, (sample, full) in pairs if full.f1 or contains_reference(sample, full)]
    by_label = {label: [records[i] for i in kept] for label, records in results.by_label.items()}
    return replace(results, by_label=by_label), [samples[i] for i in kept]


def half_of(study_set: StudySet, arguments: argparse.Namespace) -> str:
    return arguments.half if study_set.halves else "all"


def prepare(name: str, study_set: StudySet, arguments: argparse.Namespace) -> Run:
    config = EngineConfig(
        model=arguments.model or study_set.model, dtype=arguments.dtype, kv_dtype=arguments.kv_dtype or "exact"
    )
    samples = study_set.samples(arguments.data)
    if study_set.halves:
        samples = samples[1 if arguments.half == "test" else 0 :: 2]
    count = arguments.questions or (3 if arguments.quick else study_set.questions)
    settings = study_set.settings()
    if arguments.main and not study_set.keeps_settings:
        settings, study_set = main_settings(context=study_set.context), study_set.for_main()
    known = {s.label for s in settings}
    settings += [s for s in over(arguments.ratio, DEFAULT, "query", **REGRESSION) if s.label not in known]
    if arguments.only:
        settings = [s for s in settings if s.label == "reuse" or any(word in s.label for word in arguments.only)]
    return Run(study_set, Engine.load(config), samples[:count], settings, arguments.records / f"{name}.jsonl")


def add_times(arguments: argparse.Namespace, study_set: StudySet) -> None:
    """Add times to the first token to the rows of a result, of one question; a later run of the set drops them."""
    path = arguments.out / f"{TIMED}.json"
    result, until = json.loads(path.read_text(encoding="utf-8")), time.monotonic() + arguments.seconds
    one = prepare(TIMED, study_set, argparse.Namespace(**vars(arguments) | {"questions": 1}))
    timed = first_tokens(one.engine, one.samples[0], one.settings, until)
    shares = timed.pop("shares")
    rows = [row | {"first_token": shares.get(row["label"])} for row in result["rows"]]
    write_result(path, result | {"timed": {"hardware": hardware(), **timed}, "rows": rows})


if __name__ == "__main__":
    main()
