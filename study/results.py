"""Rows of a set's result: means, medians and 90th percentiles with intervals, paired differences, times to the first
token."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from answer_scores import has_unsupported
from cacheblend_store import ChunkStore
from settings import DEFAULT

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.bootstrap import Bootstrap, Column, Interval, difference, mean
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.evaluate import FULL, Results
from cacheblend_cli.evaluation.records import Record
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.evaluation.speed import device_name
from cacheblend_cli.evaluation.summary import Summary, summarise
from cacheblend_cli.types import AskRequest

MAIN_RATIO = 0.15
TIMED_ROUNDS = 3
CORRECTION = "windows"
"""Names what blend/corrections.py computes; measurements of another one are not of the same default. To be changed with
its results on any model, not when code moves."""
SAME_TOKENS = 16
Row = dict[str, Any]
Measure = Callable[[Engine, ChunkStore, Sample, float], Row]


def rows_of(results: Results, samples: Sequence[Sample], measures: Sequence[str]) -> list[Row]:
    """Return a row per setting: label, context, ratio, work (fresh token-layers over reusable ones) and the measures.

    A measure is [value, low, high], with a 95 % bootstrap interval over the questions, paired between settings, or a
    number. same_start: share of questions whose first 16 greedy tokens are full prefill's. kl: nats per token, over all
    tokens; kl_median and kl_p90: of the questions' means; less_default: the questions' mean KL minus that of the
    default at the same ratio (at .15 for reuse); nearer: number of questions on which the default is nearer.
    less_plain: of a setting with regression, KL minus that without a correction.
    """
    bootstrap = Bootstrap(len(samples))
    kls = {label: [statistics.fmean(r.kl) for r in records if r.kl] for label, records in results.by_label.items()}
    rows = []
    for summary in summarise(results, baseline="reuse" if "reuse" in results.by_label else None):
        records = results.by_label[summary.label]
        found = _summary_measures(summary) | _question_measures(bootstrap, kls[summary.label])
        found |= _answer_measures(bootstrap, samples, records)
        if "unsupported" in measures:
            found |= _against_texts(bootstrap, samples, records, results.full)
        if kls[summary.label]:
            same = [float(all(record.top1[:SAME_TOKENS])) for record in records]
            found["same_start"] = bootstrap.interval(mean, same)
        found |= _against_default(bootstrap, kls, summary)
        found["less_plain"] = _against_none(bootstrap, kls, summary.label)
        row: Row = {"label": summary.label, "context": summary.setting["context"]}
        row |= {"ratio": summary.ratio, "work": _short(summary.budget)}
        row |= {
            name: _plain(found[name]) for name in (*measures, "nearer", "less_plain") if found.get(name) is not None
        }
        rows.append(row)
    return rows


def _summary_measures(summary: Summary) -> Row:
    errors = summary.k_error[1:]  # layer 0 is right in any case
    names = ("exact_match", "f1", "norm_f1", "f1_difference", "top1", "kl", "same_answer")
    return {name: getattr(summary, name) for name in names} | {"k_error": statistics.fmean(errors) if errors else None}


def _question_measures(bootstrap: Bootstrap, kl: Sequence[float]) -> Row:
    if not kl:
        return {}
    return {"kl_median": bootstrap.interval(median, kl), "kl_p90": bootstrap.interval(p90, kl)}


def _answer_measures(bootstrap: Bootstrap, samples: Sequence[Sample], records: Sequence[Record]) -> Row:
    """found: share of answers that contain a reference answer; likelihood: of the reference answer, nats per token."""
    row: Row = {}
    if all(sample.answers for sample in samples):
        pairs = zip(samples, records, strict=True)
        found = [float(contains_reference(s, r)) for s, r in pairs]
        row["found"] = bootstrap.interval(mean, found)
    likelihood = [r.likelihood for r in records if r.likelihood is not None]
    if len(likelihood) == len(records):
        row["likelihood"] = bootstrap.interval(mean, likelihood)
    return row


def _against_texts(
    bootstrap: Bootstrap, samples: Sequence[Sample], records: Sequence[Record], full: Sequence[Record]
) -> Row:
    """unsupported: share of answers with a figure or name that is in no text of the prompt; found_difference: `found`
    minus full prefill's."""
    pairs = [*zip(samples, records, strict=True)]
    found, theirs = (
        [float(contains_reference(s, r)) for s, r in zip(samples, of, strict=True)] for of in (records, full)
    )
    return {
        "unsupported": bootstrap.interval(mean, [float(has_unsupported(s, r)) for s, r in pairs]),
        "found_difference": None if records is full else bootstrap.interval(difference, found, theirs),
    }


def contains_reference(sample: Sample, record: Record) -> bool:
    """Return whether the record's answer contains a reference answer."""
    return any(answer.lower() in record.answer.lower() for answer in sample.answers)


def _against_default(bootstrap: Bootstrap, kls: dict[str, list[float]], summary: Summary) -> Row:
    default = f"{DEFAULT} {summary.ratio or MAIN_RATIO:g}"
    ours, theirs = kls.get(default), kls[summary.label]
    if not ours or not theirs or summary.label == default:
        return {}
    return {"less_default": bootstrap.interval(difference, theirs, ours), "nearer": nearer(ours, theirs)}


def _against_none(bootstrap: Bootstrap, kls: dict[str, list[float]], label: str) -> Interval | None:
    """Return the mean KL of a setting with the regression minus that of the same setting without a correction."""
    plain = kls.get(label.replace(", regression", ""))
    return bootstrap.interval(difference, kls[label], plain) if plain and ", regression" in label else None


def median(column: Column) -> Column:
    return np.asarray(np.median(column, axis=-1))


def p90(column: Column) -> Column:
    return np.asarray(np.percentile(column, 90, axis=-1))


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return [_short(value.value), _short(value.low), _short(value.high)]
    return _short(value) if isinstance(value, float) else value


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def digits(interval: Interval | None) -> list[float]:
    """Return value, low and high with four digits; nothing of what is not a number."""
    return [] if interval is None else [float(f"{x:.4g}") for x in (interval.value, interval.low, interval.high)]


def write_result(path: Path, result: Row) -> None:
    """Write JSON with one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = [f"{json.dumps(name)}: {_lines(value)}" for name, value in result.items()]
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n " + ",\n ".join(json.dumps(row) for row in value) + "\n]"
    return json.dumps(value)


def question_parser(doc: str | None, records: str) -> argparse.ArgumentParser:
    """Return a parser of what a script over questions of `musique` takes: data, model, dtype, records (a file of that
    name by default), out."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with musique_dev.json")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records" / records)
    parser.add_argument("--out", type=Path, required=True, help="file of the result")
    return parser


def places_of(text: str) -> list[int]:
    """Return places of questions, as the command line has them: 3,5-7."""
    ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [place for ends in ranges for place in range(ends[0], ends[-1] + 1)]


def nearer(ours: Sequence[float], theirs: Sequence[float]) -> int:
    """Return on how many questions ours is lower."""
    return sum(a < b for a, b in zip(ours, theirs, strict=True))


class Measurements:
    """What was measured of each place under one setting and version of the corrections, in a file of JSON lines that a
    later run goes on from."""

    def __init__(self, path: Path, **setting: Any) -> None:
        self._path, self._setting = path, {**setting, "correction": CORRECTION}
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else [])
        self.of = {row["place"]: row for row in rows if {**row, **self._setting} == row}

    def complete(self, places: Sequence[int], samples: Sequence[Sample], measure: Measure) -> list[Row]:
        """Return what was measured of the places, and measure the others with an engine and a store of their own."""
        if missing := [place for place in places if place not in self.of]:
            dtype = self._setting["dtype"]
            engine = Engine.load(EngineConfig(model=self._setting["model"], dtype=dtype, kv_dtype=dtype))
            with (
                tempfile.TemporaryDirectory(prefix="cacheblend-study-") as folder,
                ChunkStore.open(Path(folder) / "store", mode="write") as store,
            ):
                for place in missing:
                    self.add(place, measure(engine, store, samples[place], self._setting["ratio"]))
                    print(f"  question {place}", file=sys.stderr, flush=True)
        return [self.of[place] for place in places]

    def add(self, place: int, found: Row) -> None:
        self.of[place] = {"place": place, **self._setting, **found}
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(self.of[place]) + "\n")


def hardware() -> dict[str, Any]:
    cpu = device_name(torch.device("cpu"))
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__}


def first_tokens(
    engine: Engine, sample: Sample, settings: Sequence[Setting], until: float, rounds: int = TIMED_ROUNDS
) -> dict[str, Any]:
    """Time one question under each setting in turn, round by round after a warm-up round: from the known question to
    the first token, with stored KV loaded and verified. No round but the first starts after `until` (time.monotonic()).

    Returns full_s: median seconds of full prefill; shares: each label's median over that; rounds.
    """
    seconds: dict[str, list[float]] = {s.label: [] for s in (FULL, *settings)}
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-study-") as folder,
        ChunkStore.open(Path(folder) / "store", mode="write") as store,
    ):
        chunks = SampleChunks(engine, store, [sample])
        contexts = list(dict.fromkeys(s.context for s in settings))
        chunks.store([sample], contexts)
        for number in range(rounds + 1):
            if number > 1 and time.monotonic() > until:
                break
            print(f"  first tokens, round {number} of {rounds}", file=sys.stderr, flush=True)
            for setting in (FULL, *settings):
                context = setting.context if setting.reuses else contexts[0]
                start = time.perf_counter()
                request = engine.resolve(store, AskRequest(sample.question, chunks.keys(sample, context)))
                done = (setting.prefill or Engine.hold_prefill)(engine, replace(request, blend=setting.blend))
                int(done.logits.argmax())
                if number:
                    seconds[setting.label].append(time.perf_counter() - start)
                done.sequence.release()
    median = {label: statistics.median(runs) for label, runs in seconds.items()}
    full = median.pop(FULL.label)
    shares = {label: _short(value / full) for label, value in median.items()}
    return {"full_s": _short(full), "shares": shares, "rounds": len(seconds[FULL.label])}
