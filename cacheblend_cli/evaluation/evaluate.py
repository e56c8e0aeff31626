"""Measure samples under settings, each against one full prefill of the sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cacheblend_store import ChunkStore

from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.engine.engine import Engine, Request
from cacheblend_cli.errors import UsageError
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.measures import (
    AnswerLengths,
    MeasuredPrompt,
    prefill_in_pieces,
    relative_rmse,
    run_full,
    run_setting,
)
from cacheblend_cli.evaluation.profile import check_blends
from cacheblend_cli.evaluation.records import Record, RecordFile
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.evaluation.scores import exact_match, f1, has_answer, rouge_l
from cacheblend_cli.evaluation.settings import FULL, Setting
from cacheblend_cli.types import AskRequest, AutoReport, BlendParams

NOISE_FLOOR = Setting("noise floor", BlendParams(mode="full"), prefill=prefill_in_pieces)
"""A second full prefill in another tiling: the noise of the compute dtype."""

Progress = Callable[[int, int, str], None]
"""Called with (samples done, number of samples, current question)."""


@dataclass(frozen=True)
class EvaluateOptions:
    max_tokens: int = 32  # maximum of full prefill's answer, over which settings are compared
    records: RecordFile | None = None  # measurements to resume from
    keep_chunks: bool = True  # False: remove chunks after their last sample, so that a temporary store stays small
    collecting: CollectSettings | None = None  # window and number of neighbours
    own_tokens: int | None = None  # maximum of a setting's own answer, None for max_tokens


@dataclass
class Results:
    """Records in the order of the samples."""

    settings: list[Setting]
    by_label: dict[str, list[Record]]
    skipped: list[tuple[int, str]] = field(default_factory=list)  # (number of the sample from 1, reason)
    notes: list[str] = field(default_factory=list)  # warnings
    auto: list[AutoReport] = field(default_factory=list)  # one per prompt of --ratio auto
    measured: int = 0
    resumed: int = 0

    @property
    def full(self) -> list[Record]:
        return next(self.by_label[s.label] for s in self.settings if s.is_full)


def evaluate(
    engine: Engine,
    store: ChunkStore,
    samples: Sequence[Sample],
    settings: Sequence[Setting],
    options: EvaluateOptions = EvaluateOptions(),
    on_progress: Progress = lambda done, total, text: None,
) -> Results:
    """Collect the samples' chunks and measure every setting on every sample. Full prefill runs once per sample; without
    a full setting one is added first. Samples that are too long for the model are skipped. Raises UsageError if two
    settings have the same label."""
    check_blends(engine)
    settings = list(settings) if any(s.is_full for s in settings) else [FULL, *settings]
    labels = [s.label for s in settings]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise UsageError(f"two settings have the label {min(twice)!r}", "use distinct settings")
    run = _Run(engine, store, samples, settings, options)
    last = {} if options.keep_chunks else run.last_uses(samples)
    for number, sample in enumerate(samples):
        on_progress(number, len(samples), sample.question)
        run.measure(sample, number)
        if gone := [key for key, at in last.items() if at == number]:
            store.remove_chunks(gone)
    on_progress(len(samples), len(samples), "")
    return run.results


class _Run:
    """State that is shared by all samples of one evaluation."""

    def __init__(
        self,
        engine: Engine,
        store: ChunkStore,
        samples: Sequence[Sample],
        settings: list[Setting],
        options: EvaluateOptions,
    ) -> None:
        self._engine, self._store, self._settings = engine, store, settings
        self._max_tokens = options.max_tokens
        self._own_tokens = min(options.own_tokens or options.max_tokens, options.max_tokens)
        self._records = RecordFile() if options.records is None else options.records
        self._chunks = SampleChunks(engine, store, samples, options.collecting)
        facts: dict[str, Any] = {
            "model": engine.model.fingerprint,
            "dtype": str(engine.model.decoder.dtype),
            "device": engine.model.decoder.device.type,
            "attention": engine.model.decoder.kernels.name,
            "codec": engine.collection(store).codec,
            "pool": engine.config.kv_pool_dtype,
            "max_tokens": options.max_tokens,
            "own_tokens": self._own_tokens,
        }
        self._digests = {
            s.label: s.digest(facts | (self._chunks.facts(s.context) if s.reuses else {})) for s in settings
        }
        self.results = Results(settings, {s.label: [] for s in settings})

    def last_uses(self, samples: Sequence[Sample]) -> dict[bytes, int]:
        """Map the key of each chunk to the number of the last sample that uses it."""
        contexts = _contexts(self._settings)
        return {key: i for i, s in enumerate(samples) for c in contexts for key in self._chunks.keys(s, c)}

    def measure(self, sample: Sample, number: int) -> None:
        """Measure missing settings and add the sample's records to the results, or skip the sample."""
        keys = {s.label: f"{sample.digest}-{self._digests[s.label]}" for s in self._settings}
        missing = [s for s in self._settings if self._records.get(keys[s.label]) is None]
        self.results.resumed += len(self._settings) - len(missing)
        if missing:
            try:
                self._engine.prompts.check_length(self._prompt_tokens(sample), self._max_tokens)
            except UsageError as error:
                self.results.skipped.append((number + 1, error.message))
                return
            self._measure(sample, missing, keys)
        for label, key in keys.items():
            record = self._records.get(key)
            assert record is not None
            self.results.by_label[label].append(replace(record, label=label))

    def _measure(self, sample: Sample, missing: list[Setting], keys: dict[str, str]) -> None:
        """Run full prefill, then the missing settings, context by context."""
        contexts = _contexts(missing)
        lengths = AnswerLengths(self._max_tokens, self._own_tokens)
        self._chunks.store([sample], contexts)
        full: MeasuredPrompt | None = None
        for context in contexts:
            start = time.perf_counter()
            keys_of = self._chunks.keys(sample, context)
            request = self._engine.resolve(self._store, AskRequest(sample.question, keys_of))
            before_s = time.perf_counter() - start
            for setting in [s for s in missing if (s.context == context if s.reuses else full is None)]:
                if full is None:
                    full = run_full(self._engine, request, lengths, before_s)
                self._records.add(self._record(sample, setting, keys[setting.label], request, full, before_s))
                self.results.measured += 1
            self.results.notes += request.notes

    def _prompt_tokens(self, sample: Sample) -> int:
        template = self._engine.template
        fixed = len(template.prefix_ids) + len(template.suffix_ids(sample.question))
        return fixed + self._chunks.num_tokens(sample)

    def _record(
        self, sample: Sample, setting: Setting, key: str, request: Request, full: MeasuredPrompt, before_s: float
    ) -> Record:
        """Measure a setting. full: full prefill of the prompt."""
        found = full
        if not setting.is_full:
            options = replace(request.options, auto=setting.auto)
            asked, run = replace(request, blend=setting.blend, options=options), setting.prefill
            found = run_setting(self._engine, asked, full.lengths, before_s, run or Engine.hold_prefill, full)
            self.results.auto += [] if found.prefilled.auto is None else [found.prefilled.auto]
        plan = found.prefilled.plan
        return Record(
            key=key,
            label=setting.label,
            sample=sample.digest,
            answer=found.text,
            tags=sample.tags,
            prompt_tokens=plan.num_tokens,
            cached_tokens=plan.cached_tokens,
            exact_tokens=plan.exact_tokens,
            recomputed_tokens=len(found.prefilled.result.chosen),
            recompute_fraction=found.prefilled.recompute_fraction,
            ttft_s=found.ttft_s,
            prefill_s=found.prefilled.prefill_s,
            **_compared(found, full),
            **_scores(sample, found.text),
        )


def _contexts(settings: Sequence[Setting]) -> list[str]:
    """Return the contexts of settings that reuse chunks; at least one, since the prompt's ids come from chunks."""
    return list(dict.fromkeys(s.context for s in settings if s.reuses)) or [settings[0].context]


def _compared(found: MeasuredPrompt, full: MeasuredPrompt) -> dict[str, Any]:
    """Return the distances from full prefill; none for full prefill itself."""
    if found.divergence is None:
        return {}
    return {
        "kl": found.divergence.kl,
        "top1": found.divergence.top1,
        "k_error": tuple(relative_rmse(found.k, full.k)),
        "v_error": tuple(relative_rmse(found.v, full.v)),
        "attention_error": tuple(relative_rmse(found.attended, full.attended)),
        "same_answer": found.text == full.text,
        "f1_full": f1(found.text, [full.text]),
        "rouge_full": rouge_l(found.text, [full.text]),
    }


def _scores(sample: Sample, text: str) -> dict[str, Any]:
    """Return the scores against the references; none without references."""
    if not sample.answers:
        return {}
    of = text, sample.answers
    return {"exact_match": exact_match(*of), "has_answer": has_answer(*of), "f1": f1(*of), "rouge_l": rouge_l(*of)}
