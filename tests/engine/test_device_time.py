"""Seconds on a GPU are the device's, and are read when the first token is on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_driver import CoreDriver, StoredEngine, open_stored_engine

from cacheblend_cli.engine.events import Limits
from cacheblend_cli.engine.worker import prefill
from cacheblend_cli.engine.worker.sampling import Draw
from cacheblend_cli.evaluation.evaluate import EvaluateOptions, evaluate
from cacheblend_cli.evaluation.samples import Context, Sample
from cacheblend_cli.evaluation.settings import FULL, Setting
from cacheblend_cli.kv import device_time
from cacheblend_cli.kv.device_time import DeviceTime, mark
from cacheblend_cli.kv.loader import HostLoader
from cacheblend_cli.types import BlendParams

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("time"), num_hidden_layers=2) as stored:
        yield stored


class Clock:
    """A device on which 100 s pass between two events of a stream. Times are known once an event was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        clock, count = self, iter(range(10**6))

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.done = False

            def record(self) -> None:
                self.at = next(count)

            def synchronize(self) -> None:
                clock.log.append("wait")
                self.done = True

            def elapsed_time(self, end: Any) -> float:
                assert end.done
                return 1e5 * (end.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(prefill, "mark", lambda device: mark(CUDA))
        fetch = Draw.fetch
        monkeypatch.setattr(Draw, "fetch", lambda draw: (self.log.append("token"), fetch(draw))[1])


def test_pieces_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    first, between, last = (mark(CUDA) for _ in range(3))
    time = DeviceTime().plus(first, between).plus(between, last)
    mark(CUDA)
    assert not clock.log
    assert time.seconds == 200
    assert DeviceTime().seconds == 0


def test_on_a_cpu_it_is_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_time.time, "perf_counter", iter((1.0, 3.5, 7.0, 7.25)).__next__)
    cpu = torch.device("cpu")
    assert DeviceTime().plus(mark(cpu), mark(cpu)).plus(mark(cpu), mark(cpu)).seconds == 2.75


def test_an_answer_and_its_check_report_the_devices_seconds(
    stored: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for them before the first token."""
    clock = Clock(monkeypatch)
    driver = CoreDriver(stored, Limits(max_rows=64, enable_prefix_caching=False))
    listener, _ = driver.arrive(stored.question(max_tokens=4), verify=True)
    driver.run()
    [answer] = listener.done().answers
    assert answer.timing.prefill_s % 100 == 0 < answer.timing.prefill_s
    assert answer.verify is not None
    pieces = -(-answer.prompt_tokens // 64)
    assert answer.verify.full_ttft_s == 100 * pieces
    assert clock.log[0] == "token"


def test_eval_reports_the_devices_seconds(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    contexts = Context("alpha beta gamma delta " * 5), Context("epsilon zeta eta theta " * 5)
    sample = Sample("where does Mara work?", (), contexts)
    reuse = Setting("reuse", BlendParams(mode="reuse"))
    results = evaluate(stored.engine, stored.store, [sample], [FULL, reuse], EvaluateOptions(max_tokens=4))
    for records in results.by_label.values():
        assert records[0].prefill_s % 100 == 0 < records[0].prefill_s


@pytest.mark.parametrize("num_answers", [1, 2])
def test_figures_of_loading_are_read_after_the_first_token(
    stored: StoredEngine, monkeypatch: pytest.MonkeyPatch, num_answers: int
) -> None:
    log: list[str] = []
    fetch = Draw.fetch
    monkeypatch.setattr(Draw, "fetch", lambda draw: (log.append("token"), fetch(draw))[1])

    def stall_s(loader: HostLoader) -> float:
        log.append("stall")
        return 0.25

    monkeypatch.setattr(HostLoader, "stall_s", property(stall_s))
    driver = CoreDriver(stored, Limits(enable_prefix_caching=False))
    question = stored.question(max_tokens=3)
    driver.ask(replace(question, sampling=replace(question.sampling, n=num_answers)))
    assert log[: num_answers + 1] == ["token"] * num_answers + ["stall"]
    assert driver.core.counts.stall_s == 0.25
