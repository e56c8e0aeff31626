"""`--ratio auto`: chooses a prompt's ratio from measured speeds, and learns from each prefill. For any blended prompt:
estimates when a full prefill's first token would have come, and on a GPU, without a ratio of the user's, does a full
prefill if that is faster."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cacheblend_cli.blend.cost import at_ratio, decide, estimate, estimate_full, learn, or_full
from cacheblend_cli.blend.policy import policy_of
from cacheblend_cli.blend.speeds import full_speeds, kv_share, measure_compute, read_speeds, speed_file, write_speeds
from cacheblend_cli.engine.core.hooks import Hook
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.events import OnEvent
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.decode import GraphRunner
from cacheblend_cli.engine.worker.memory import DeviceMemory
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.rows import LEAST_KV_BUCKET, bucket
from cacheblend_cli.prompt.plan import Segment, SegmentStatus
from cacheblend_cli.types import FULL_IS_FASTER, Answer, AutoReport, Decision, Speeds, Workload

_LOAD_AGAIN = 16  # full prefills in a row


def admit(runtime: Runtime, request: Request) -> tuple[Request, Hook | None]:
    request, report = decided(runtime, request)
    if report is None and request.options.estimate_full and _can_estimate(runtime, request):
        request, report = Controller(runtime, request).predict(request)
    if report is None:
        return request, None
    is_shown = request.options.auto or request.full_for_speed
    return request, (AutoRatio if is_shown else PredictedPrefill)(runtime, report)


class PredictedPrefill(Hook):
    """Reports the estimated time of a full prefill, and learns from the prefill."""

    def __init__(self, runtime: Runtime, report: AutoReport) -> None:
        self._runtime, self._report, self._missed = runtime, report, 0
        self.is_alone = report.decision.mode == "blend" or not prefill_times(runtime)  # else it is not timed

    def on_begin(self) -> None:
        self._missed = _missed_graphs(self._runtime)

    def on_answer(self, report: PrefillReport, index: int, answer: Answer) -> None:
        answer.timing = replace(answer.timing, full_ttft_s=full_ttft_s(self._report.decision, answer.timing.ttft_s))

    def on_done(self, report: PrefillReport, answers: Sequence[Answer], emit: OnEvent) -> None:
        """Update the speeds, unless a part of the prompt was cached, or a blended prefill lacked graphs that the next
        one has."""
        lacked = self._report.decision.mode == "blend" and _missed_graphs(self._runtime) > self._missed
        if report.prefix_cache_tokens or lacked:
            return
        prefill_s = report.prefill_s
        rest_s = max(0.0, answers[0].timing.ttft_s - self._report.before_s - prefill_s)
        Controller(self._runtime, report.request).learn(self._report, report, prefill_s, rest_s)


class AutoRatio(PredictedPrefill):
    """Reports the decision, too."""

    def on_answer(self, report: PrefillReport, index: int, answer: Answer) -> None:
        super().on_answer(report, index, answer)
        answer.auto = replace(self._report, ttft_s=answer.timing.ttft_s)


def full_ttft_s(decision: Decision, ttft_s: float) -> float:
    """Estimate a full prefill's time to the first token. ttft_s: measured time, of the prefill that was decided. What
    else it contains (the queue, weights that are read for the first time) is in both."""
    full_s = decision.full.prefill_s
    return max(full_s, ttft_s + full_s - decision.chosen.prefill_s)


class Controller:
    """Decides by the speeds of the model on this machine for the request's codec, which the runtime holds. Compute is
    measured once; the speed of loading is learnt from blended prompts.

    On a GPU, full prefills have the speeds of those that sized its pool. The others are learnt from blended prompts of
    similar length: the host's time, which most of them wait for, does not grow with their rows.
    """

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self._runtime, self._codec, self._length = runtime, request.collection.codec, 0
        self._full: Speeds | None = None  # of full prefills, if others have other speeds
        if times := prefill_times(runtime):
            self._full = runtime.speeds.get((self._codec, 0)) or self._keep(full_speeds(runtime.model.spec, times))
            self._length = bucket(request.plan.num_tokens, LEAST_KV_BUCKET)

    def decide(self, request: Request) -> tuple[Request, AutoReport]:
        """Return the request at the largest ratio that loading hides, at least request.blend.ratio, or as a full
        prefill. The answer's time excludes measuring this machine, which happens once."""
        request, report = self._reported(request, partial(decide, floor=request.blend.ratio))
        if report.decision.mode == "full":
            return _in_full(request), report
        return replace(request, blend=replace(request.blend, ratio=report.decision.ratio)), report

    def decide_mode(self, request: Request) -> tuple[Request, AutoReport]:
        """Return the request at its own ratio, or as a full prefill if that is estimated to be no slower."""
        request, report = self.predict(request)
        blended, full = report.decision, self._full
        decision = blended if full is None else or_full(blended, report.work, full)
        if decision.mode == "blend":
            return request, report
        request.notes.append(
            f"a full prefill is faster here: {decision.chosen.prefill_s * 1e3:.0f} ms, {blended.chosen.prefill_s * 1e3:.0f} "
            f"blended, by estimate; --ratio {blended.ratio:g} blends"
        )
        report = replace(report, decision=decision, predicted_ttft_s=report.predicted_full_ttft_s)
        return replace(_in_full(request), ratio_from=FULL_IS_FASTER), report

    def predict(self, request: Request) -> tuple[Request, AutoReport]:
        """Return the request, and the estimates for its own ratio. The answer's time is as with `decide`."""
        ratio = request.blend.effective_ratio()
        return self._reported(request, partial(at_ratio, ratio=ratio, floor=ratio))

    def _reported(self, request: Request, decided: Callable[..., Decision]) -> tuple[Request, AutoReport]:
        resolved = time.perf_counter()
        speeds = self._measured()
        if self._full is None:  # nothing is measured on a GPU, and a copy lays out its plan again
            request = replace(request, started=request.started + time.perf_counter() - resolved)
        work = workload(request)
        before_s = time.perf_counter() - request.started
        decision, other_s = decided(speeds, work, full=self._full), before_s + speeds.rest_s
        predicted_s, full_s = (other_s + e.prefill_s for e in (decision.chosen, decision.full))
        return request, AutoReport(decision, speeds, work, before_s, predicted_s, full_s)

    def _measured(self) -> Speeds:
        """Return the speeds; measure them if they are missing.

        Full prefills teach nothing about loading, and on a GPU nothing about blending: after some of them in a row that
        is forgotten, so that a bad first measurement does not persist.
        """
        runtime, full = self._runtime, self._full
        speeds = runtime.speeds.get((self._codec, self._length)) or read_speeds(self._file)
        forgets = speeds is not None and speeds.not_loaded >= _LOAD_AGAIN
        if full is not None and (speeds is None or forgets):  # the first guess: rows cost what they cost in full
            return self._keep(full)
        if speeds is None:
            runtime.say(f"measuring how fast this machine is with {runtime.model.name}, once")
            return self._keep(measure_compute(runtime.decoder, runtime.config.block_size))
        if forgets:
            return self._keep(replace(speeds, bytes_per_s=math.inf, not_loaded=0))
        runtime.speeds[self._codec, self._length] = speeds
        return speeds

    def learn(self, report: AutoReport, done: PrefillReport, prefill_s: float, rest_s: float | None = None) -> None:
        """Update the speeds from a prefill. rest_s: seconds from its end to the first token, None if unknown.

        Ignores a prefill that computed a damaged chunk instead of loading it: its workload was different.
        """
        speeds, work = self._runtime.speeds[self._codec, self._length], report.work
        loader, is_measured = done.result.loader, self._full is None
        if report.decision.mode == "full" and not is_measured:
            self._keep(replace(speeds, not_loaded=speeds.not_loaded + 1))
            return
        if report.decision.mode == "full":
            predicted = estimate_full(speeds, work)
        elif loader.num_bytes == work.kv_bytes:
            ratio = len(done.result.chosen) / work.inexact if work.inexact else 0.0
            predicted = estimate(speeds, work, ratio)
        else:
            return
        rest_s = speeds.rest_s if rest_s is None else rest_s
        computed_s = prefill_s - loader.stall_s
        load_s = min(loader.load_s, prefill_s)  # not with the decode steps of other answers between its layers
        loaded = (0, 0.0) if work.tier_bytes else (loader.num_bytes, load_s)
        self._keep(learn(speeds, predicted.compute_s, computed_s, loaded, rest_s, is_measured))

    @property
    def _file(self) -> Path:
        return speed_file(self._runtime.model, self._codec, self._length)

    def _keep(self, speeds: Speeds) -> Speeds:
        self._runtime.speeds[self._codec, self._length] = speeds
        write_speeds(self._file, speeds)
        return speeds


def decided(runtime: Runtime, request: Request) -> tuple[Request, AutoReport | None]:
    """Return the request with the controller's decision, and its report: with --ratio auto, and on a GPU if the user
    chose no way to blend. Else unchanged. Raises UsageError for --ratio auto with several ratios."""
    is_whole = runtime.decoder.part.is_whole
    if request.may_be_full and is_whole and request.plan.inexact_tokens and prefill_times(runtime):
        return Controller(runtime, request).decide_mode(request)
    if not request.options.auto or request.blend.mode != "blend":
        return request, None
    if not is_whole:
        raise UsageError("--ratio auto is not implemented with --tensor-parallel", "give a ratio, such as 0.15")
    if request.blend.checks:
        raise UsageError("--ratio auto chooses one ratio, but several check layers were given", "give a ratio to each")
    return Controller(runtime, request).decide(request)


def prefill_times(runtime: Runtime) -> tuple[tuple[int, float], ...]:
    """Return (rows, seconds) of the full prefills that sized a GPU's pool; () on other devices."""
    memory = _gpu_memory(runtime)
    return () if memory is None or memory.profile is None else memory.profile.times


def _missed_graphs(runtime: Runtime) -> int:
    """Return how many layers of prefills on a GPU had no graph yet."""
    memory = _gpu_memory(runtime)
    graphs = memory.runner.layer_graphs if memory is not None and isinstance(memory.runner, GraphRunner) else None
    return 0 if graphs is None else graphs.num_missed


def _gpu_memory(runtime: Runtime) -> DeviceMemory | None:
    return runtime.memory() if runtime.decoder.device.type == "cuda" else None


def _in_full(request: Request) -> Request:
    return replace(request, blend=replace(request.blend, mode="full"), full_for_speed=True)


def _can_estimate(runtime: Runtime, request: Request) -> bool:
    blend, plan = request.blend, request.plan
    if blend.mode == "full" or blend.checks or plan.in_order:
        return False
    return bool(plan.cached_tokens) and runtime.decoder.part.is_whole


def workload(request: Request) -> Workload:
    model = request.collection.model
    plan, policy = request.plan, policy_of(request.blend, model.spec.num_kv_layers, request.lossless)
    tier = None if request.store is None or request.tiered is None else request.store.tier
    return Workload(
        num_layers=model.spec.num_kv_layers,
        total=plan.num_tokens,
        inexact=plan.inexact_tokens,
        inexact_keys=_mean_keys(plan.segments, "blended"),
        fresh=plan.fresh_tokens,
        fresh_keys=_mean_keys(plan.segments, "computed"),
        kv_bytes=kv_bytes(request),
        kv_share=kv_share(model.spec),
        check_layer=request.blend.check_layer if policy.selector.needs_check_layer else 0,
        layer0_exact=request.lossless,
        probe_layers=max(policy.probe_layers) + 1 if policy.probes else 0,
        corrected=policy.correction is not None,
        tier_bytes=0 if request.tiered is None else kv_bytes(request, request.tiered.found),
        tier_bytes_per_s=math.inf if tier is None else tier.bytes_per_s or math.inf,
        tier_latency_s=0.0 if tier is None else tier.latency_s,
    )


def kv_bytes(request: Request, keys: Container[bytes | None] | None = None) -> int:
    """Return the bytes of stored KV to load, all layers. keys: of these chunks alone."""
    size, stored = request.collection.chunk_bytes, request.plan.stored
    counts = Counter((s.num_tokens, s.codec) for s in stored if keys is None or s.key in keys)
    return sum(count * size(*of) for of, count in counts.items())


def _mean_keys(segments: Sequence[Segment], status: SegmentStatus) -> float:
    """Return the mean number of keys per row of the segments with this status: a row at position p sees p + 1."""
    own = [s for s in segments if s.status == status]
    return sum((s.start + 1 + s.end) * s.num_tokens / 2 for s in own) / max(1, sum(s.num_tokens for s in own))
