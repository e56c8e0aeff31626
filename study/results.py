"""Rows of a set's result: means, medians and 90th percentiles with intervals, paired differences, times to the first
token."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from answer_scores import contains_reference, has_unsupported
from cacheblend_store import ChunkStore
from settings import DEFAULT

from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.bootstrap import Bootstrap, Interval, difference
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.evaluate import FULL, Results
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
WITH_INTERVAL = {"kl", "norm_f1", "f1_difference", "less_default", "less_plain"}
Row = dict[str, Any]


def rows_of(results: Results, samples: Sequence[Sample], measures: Sequence[str]) -> list[Row]:
    """Return a row per setting: label, ratio, work (fresh token-layers over reusable ones) and the measures.

    Measures of WITH_INTERVAL are [value, low, high], with a 95 % bootstrap interval over the questions, paired between
    settings. same_start: share of questions whose first 16 greedy tokens are full prefill's. kl: nats per token, over
    all tokens; kl_median and kl_p90: of the questions' means; less_default: the questions' mean KL minus that of the
    default at the same ratio (at .15 for reuse); nearer: number of questions on which the default is nearer.
    less_plain: of a setting with regression, KL minus that without a correction. found: share of answers that contain a
    reference answer; unsupported: with a figure or name that is in no text of the prompt.
    """
    bootstrap = Bootstrap(len(samples))
    kls = {label: [statistics.fmean(r.kl) for r in records if r.kl] for label, records in results.by_label.items()}
    rows = []
    for summary in summarise(results, baseline="reuse" if "reuse" in results.by_label else None):
        records, kl = results.by_label[summary.label], kls[summary.label]
        found = _summary_measures(summary)
        if "found" in measures:
            found["found"] = statistics.fmean(contains_reference(*pair) for pair in zip(samples, records, strict=True))
        if "unsupported" in measures:
            marked = (has_unsupported(*pair) for pair in zip(samples, records, strict=True))
            found["unsupported"] = statistics.fmean(marked)
        if kl:
            found |= {"kl_median": statistics.median(kl), "kl_p90": float(np.percentile(kl, 90))}
            found["same_start"] = statistics.fmean(all(record.top1[:SAME_TOKENS]) for record in records)
        found |= _against_default(bootstrap, kls, summary)
        found["less_plain"] = _against_none(bootstrap, kls, summary.label)
        row: Row = {"label": summary.label, "ratio": summary.ratio, "work": _short(summary.budget)}
        shown = (*measures, "nearer", "less_plain")
        rows.append(row | {name: _plain(name, found[name]) for name in shown if found.get(name) is not None})
    return rows


def _summary_measures(summary: Summary) -> Row:
    errors = summary.k_error[1:]  # layer 0 is right in any case
    names = ("exact_match", "f1", "norm_f1", "f1_difference", "top1", "kl", "same_answer")
    return {name: getattr(summary, name) for name in names} | {"k_error": statistics.fmean(errors) if errors else None}


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


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Interval):
        ends = (value.low, value.high) if name in WITH_INTERVAL else ()
        return [*map(_short, (value.value, *ends))] if ends else _short(value.value)
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


def nearer(ours: Sequence[float], theirs: Sequence[float]) -> int:
    """Return on how many questions ours is lower."""
    return sum(a < b for a, b in zip(ours, theirs, strict=True))


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
