"""Summaries of a run's records by setting: means, intervals, and distance from full prefill and from reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any

from cacheblend_cli.evaluation.bootstrap import Bootstrap, Interval, difference, mean, normalised, pooled
from cacheblend_cli.evaluation.evaluate import Results
from cacheblend_cli.evaluation.records import Record
from cacheblend_cli.evaluation.settings import Setting


@dataclass(frozen=True)
class Summary:
    """One setting over all samples. Intervals are 95 % paired bootstraps over the samples. Seconds are medians."""

    label: str
    setting: dict[str, Any]
    samples: int
    # against the references, None without any
    exact_match: Interval | None
    has_answer: Interval | None
    f1: Interval | None
    rouge_l: Interval | None
    f1_difference: Interval | None  # to full prefill
    norm_f1: Interval | None  # needs a reuse setting
    # against full prefill's answer, None for full prefill itself
    same_answer: Interval | None
    f1_full: Interval | None
    rouge_full: Interval | None
    top1_first: Interval | None  # at the first token
    top1: Interval | None  # over all tokens
    kl_first: Interval | None
    kl: Interval | None
    kl_worst: Interval | None  # mean of each answer's largest KL
    # mean relative RMSE, one per layer
    k_error: list[float]
    v_error: list[float]
    attention_error: list[float]
    ratio: float  # as requested, or the mean of --ratio auto
    recomputed: float  # recomputed tokens over reusable, inexact ones
    budget: float  # fresh token-layers over layers x reusable tokens
    ttft_s: float
    prefill_s: float
    ttft_quartiles_s: tuple[float, float] = (0.0, 0.0)


def summarise(results: Results, *, baseline: str | None = None, resamples: int = 2000) -> list[Summary]:
    """Return a summary per setting, in order. baseline: label of the setting that NormF1 counts from; by default the
    first setting that reuses everything without repair."""
    columns, full = results.by_label, results.full
    if baseline is None:
        baseline = next((s.label for s in results.settings if s.reuses and s.blend.effective_ratio() == 0), None)
    reuse = columns[baseline] if baseline else []
    bootstrap = Bootstrap(len(full), resamples)
    return [_summary(s, columns[s.label], full, reuse, bootstrap) for s in results.settings]


def _summary(
    setting: Setting, records: list[Record], full: list[Record], reuse: list[Record], bootstrap: Bootstrap
) -> Summary:
    def of(name: str) -> Interval | None:
        values = [getattr(r, name) for r in records]
        return None if None in values else bootstrap.interval(mean, values)

    def against(statistic: Callable[..., Any], *others: list[Record]) -> Interval | None:
        values = [[r.f1 for r in column if r.f1 is not None] for column in (records, *others)]
        return bootstrap.interval(statistic, *values) if all(len(v) == len(records) for v in values) else None

    def first(name: str) -> Interval | None:
        return None if setting.is_full else bootstrap.interval(mean, [getattr(r, name)[0] for r in records])

    def tokens(name: str) -> Interval | None:
        if setting.is_full:
            return None
        sums = [sum(getattr(r, name)) for r in records]
        return bootstrap.interval(pooled, sums, [len(getattr(r, name)) for r in records])

    inexact = sum(r.cached_tokens - r.exact_tokens for r in records)
    return Summary(
        label=setting.label,
        setting=setting.to_dict(),
        samples=len(records),
        exact_match=of("exact_match"),
        has_answer=of("has_answer"),
        f1=of("f1"),
        rouge_l=of("rouge_l"),
        f1_difference=None if setting.is_full else against(difference, full),
        norm_f1=against(normalised, reuse, full) if setting.reuses else None,
        same_answer=of("same_answer"),
        f1_full=of("f1_full"),
        rouge_full=of("rouge_full"),
        top1_first=first("top1"),
        top1=tokens("top1"),
        kl_first=first("kl"),
        kl=tokens("kl"),
        kl_worst=None if setting.is_full else bootstrap.interval(mean, [max(r.kl) for r in records]),
        k_error=_layers([r.k_error for r in records]),
        v_error=_layers([r.v_error for r in records]),
        attention_error=_layers([r.attention_error for r in records]),
        ratio=_mean_ratio(records) if setting.auto else setting.blend.effective_ratio(),
        recomputed=sum(r.recomputed_tokens for r in records) / inexact if inexact else 0.0,
        budget=fmean(r.recompute_fraction for r in records) if records else 0.0,
        ttft_s=median(r.ttft_s for r in records) if records else 0.0,
        prefill_s=median(r.prefill_s for r in records) if records else 0.0,
        ttft_quartiles_s=_quartiles([r.ttft_s for r in records]),
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile; the value itself if there is only one."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third


def _layers(errors: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(column) for column in zip(*(e for e in errors if e), strict=True)]


def _mean_ratio(records: list[Record]) -> float:
    """Return the mean ratio: 1 for a prompt that reused nothing, 0 for one without inexact tokens."""
    ratios = [
        r.recomputed_tokens / inexact if (inexact := r.cached_tokens - r.exact_tokens) else float(not r.cached_tokens)
        for r in records
    ]
    return fmean(ratios) if ratios else 0.0
