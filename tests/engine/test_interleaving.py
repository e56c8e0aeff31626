"""A prompt pauses between its layers: answers beside it go on, and it gives the same answer as alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from engine_driver import CoreDriver, Listener, StoredEngine, ids_of, open_stored_engine
from held_store import HeldStore

from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.engine.core import executor
from cacheblend_cli.engine.core.sequence import RequestState
from cacheblend_cli.engine.events import Done, Limits
from cacheblend_cli.engine.worker.prefill import PrefillState
from cacheblend_cli.kv.loader import HostLoader
from cacheblend_cli.kv.source import BadChunk
from cacheblend_cli.types import AskRequest, BlendParams, Piece

LAYERS = 6
LIMITS = Limits(
    max_sequences=4, max_rows=16, pool_tokens=16 * 80, enable_prefix_caching=False
)  # a slice of 16 rows; a blend has many more
BLENDS = {
    "query": BlendParams(ratio=0.4),
    "probe": BlendParams(ratio=0.4, probe_layers=(1, 3)),
    "hkvd": BlendParams(ratio=0.4, selector="hkvd"),
    "gradual": BlendParams(selector="hkvd", checks=((1, 0.6), (3, 0.3))),
    "query:4+hkvd": BlendParams(ratio=0.4, selector="query:4+hkvd", correction="none"),
    "full": BlendParams(mode="full"),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("interleaving"), num_hidden_layers=LAYERS) as stored:
        yield stored


def asked(stored: StoredEngine, blend: BlendParams, **sampling: object) -> AskRequest:
    return replace(stored.question("where does the harbor keeper with the parrot live?", **sampling), blend=blend)


def prefill_of(driver: CoreDriver, state: RequestState) -> PrefillState | None:
    """What the worker has of the prompt while it is computed."""
    running = state.sequences[0].prefill if state.sequences else None
    return None if running is None else driver.core.worker._prefills[running.number]


def paused(driver: CoreDriver, state: RequestState) -> bool:
    """Whether the prompt is between two of its layers."""
    running = state.sequences[0].prefill if state.sequences else None
    return running is not None and any(running.number in key for key in driver.core.worker._paused)


def until_text(driver: CoreDriver, listener: Listener) -> None:
    while not any(isinstance(e, Piece) for e in listener.events):
        driver.step()


def until_paused(driver: CoreDriver, state: RequestState, times: int = 2) -> None:
    while times:
        driver.step()
        assert state in driver.core.scheduler.states
        times -= paused(driver, state)


@pytest.mark.parametrize("name", [*BLENDS, "verify"])
def test_a_stream_goes_on_between_the_layers_of_a_prompt(stored: StoredEngine, name: str) -> None:
    verify = name == "verify"
    question = asked(stored, BLENDS["query" if verify else name], logprobs=1)
    stream = stored.question("what keeps the parrot?", max_tokens=100)
    alone = CoreDriver(stored, LIMITS)
    by_itself, _ = alone.arrive(question, verify=verify)
    alone.run()
    streamed_alone = alone.ask(stream)

    driver = CoreDriver(stored, LIMITS, prefill_s=0.0)
    streaming, _ = driver.arrive(stream)
    until_text(driver, streaming)
    listener, state = driver.arrive(question, verify=verify)
    counts = []  # tokens of the stream, each time that the prompt is paused
    while not listener.last.done():
        driver.step()
        if not streaming.last.done() and driver.core.worker._paused and bool(state.num_started) == verify:
            counts.append(tokens_of(driver, 0))
    assert counts[-1] - counts[0] >= LAYERS - 2
    assert max(b - a for a, b in pairwise(counts)) == 1, "a token for each layer"
    driver.run()
    assert ids_of(streaming) == streamed_alone
    assert answers(listener) == answers(by_itself)


def test_a_step_ends_before_the_layer_that_would_be_late(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CoreDriver(stored, LIMITS, prefill_s=2.5)
    streaming, _ = driver.arrive(stored.question("what keeps the parrot?", max_tokens=60))
    until_text(driver, streaming)
    monkeypatch.setattr(executor, "perf_counter", itertools.count().__next__)  # a layer takes a second
    prefill, calls = driver.core.worker.prefill, list[list[PrefillResult]]()

    def count(numbers: Sequence[int], max_rows: int, waits: bool) -> list[PrefillResult]:
        calls.append(prefill(numbers, max_rows, waits))
        return calls[-1]

    monkeypatch.setattr(driver.core.worker, "prefill", count)
    _, state = driver.arrive(asked(stored, BLENDS["full"]))
    until_paused(driver, state, times=1)
    assert len(calls) == 2
    driver.run()


@pytest.mark.parametrize("name", ["query", "hkvd"])
def test_a_prompt_waits_for_its_layers_beside_a_stream(
    stored: StoredEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wait = HeldStore(stored.store), HostLoader.wait

    def lets_go(loader: HostLoader, layer: int) -> None:
        if layer >= LAYERS // 2:
            store.let_go()
        wait(loader, layer)

    driver = CoreDriver(replace(stored, store=store), LIMITS, prefill_s=60.0)
    streaming, _ = driver.arrive(stored.question("what keeps the parrot?", max_tokens=60))
    until_text(driver, streaming)
    store.hold_from(LAYERS // 2)
    monkeypatch.setattr(HostLoader, "wait", lets_go)
    listener, state = driver.arrive(asked(stored, BLENDS[name]))
    for _ in range(20):
        driver.step()
        assert not paused(driver, state)
    assert state.num_started
    store.let_go()
    driver.run()
    assert listener.done().answers


def tokens_of(driver: CoreDriver, number: int) -> int:
    [state] = [s for s in driver.core.scheduler.states if s.number == number]
    output = state.sequences[0].output
    assert output is not None
    return len(output.out.token_ids)


def answers(listener: Listener) -> list[object]:
    return [
        (a.generated_ids, a.logprobs, a.chosen, a.recompute_fraction, a.verify and a.verify.answer_kl)
        for a in listener.done().answers
    ]


@pytest.mark.parametrize("cancels", [False, True], ids=["continued", "cancelled"])
def test_short_prompts_pause_together(stored: StoredEngine, cancels: bool) -> None:
    """The next one does not join their launch, and without one of them the others begin again."""
    text = "who keeps a parrot at home near the harbor"
    questions = [replace(stored.question(f"{text} {end}"), keys=()) for end in ("?", "!", ".")]
    limits = replace(LIMITS, max_rows=160)
    expected = [CoreDriver(stored, limits).ask(question) for question in questions]
    driver = CoreDriver(stored, limits, prefill_s=0.0)
    streaming, _ = driver.arrive(stored.question("what keeps the parrot?", max_tokens=60))
    until_text(driver, streaming)
    (first, state), (second, _) = (driver.arrive(question) for question in questions[:2])
    until_paused(driver, state, 3)
    [together] = driver.core.worker._paused
    assert len(together) == 2
    third, _ = driver.arrive(questions[2])
    driver.step()
    assert [*driver.core.worker._paused] == [together]
    state.cancelled = cancels
    driver.run()
    assert driver.core.counts.joined == (0 if cancels else 2)
    found = [second, third] if cancels else [first, second, third]
    assert [ids_of(listener) for listener in found] == expected[-len(found) :]


@pytest.mark.parametrize("name", ["probe", "hkvd"])
def test_a_paused_blend_that_is_cancelled_gives_everything_back(stored: StoredEngine, name: str) -> None:
    for times in (1, 3):
        driver = CoreDriver(stored, LIMITS)
        listener, state = driver.arrive(asked(stored, BLENDS[name]))
        until_paused(driver, state, times)
        state.cancelled = True
        driver.step()
        assert listener.done() == Done([], "cancelled")
        assert not driver.core.worker._paused
        driver.run()  # which checks that no block is used
        assert driver.ask(stored.question())


def test_a_chunk_that_turns_bad_during_the_pause_is_computed(stored: StoredEngine) -> None:
    question = asked(stored, BLENDS["hkvd"])
    driver = CoreDriver(stored, LIMITS)
    listener, state = driver.arrive(question)
    until_paused(driver, state)
    prefill = prefill_of(driver, state)
    assert prefill is not None

    def wait(layer: int) -> None:
        raise BadChunk(stored.keys[1], "it was damaged")

    prefill._loader.wait = wait  # type: ignore[method-assign]
    driver.run()
    [answer] = listener.done().answers
    assert [use.status == "computed" for use in answer.chunks] == [i == 1 for i in range(len(stored.keys))]
    assert any("it was damaged" in note for note in answer.notes)


def test_the_machine_is_measured_at_the_first_auto(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.engine.runtime.speeds.clear()
    monkeypatch.setattr("cacheblend_cli.engine.features.auto_ratio.read_speeds", lambda file: None)
    driver = CoreDriver(stored, LIMITS)
    streaming, _ = driver.arrive(stored.question("what keeps the parrot?", max_tokens=20))
    until_text(driver, streaming)
    listener, state = driver.arrive(asked(stored, BLENDS["query"]), auto=True)
    assert (state.request.collection.codec, 0) in stored.engine.runtime.speeds
    driver.run()
    [answer] = listener.done().answers
    assert answer.auto is not None
    assert streaming.done().answers[0].generated_ids


def test_a_paused_launch_goes_on_beside_a_prompt_of_a_priority_in_between(stored: StoredEngine) -> None:
    limits = replace(LIMITS, max_sequences=6, max_rows=200)  # three short prompts fit a launch
    questions = [
        replace(stored.question(f"who keeps a parrot at home near the harbor {end}"), keys=()) for end in "?!."
    ]
    alone = [CoreDriver(stored, limits).ask(question) for question in questions]
    driver = CoreDriver(stored, limits, prefill_s=0.0)
    until_text(driver, driver.arrive(stored.question("what keeps the parrot?", max_tokens=80))[0])
    joined = [driver.arrive(question, priority=priority) for question, priority in zip(questions, (0, 2), strict=False)]
    until_paused(driver, joined[1][1])
    [launch] = driver.core.worker._paused
    assert len(launch) == 2
    between, _ = driver.arrive(questions[2], priority=1)
    while driver.core.worker._paused.keys() & {launch}:
        driver.step()
        assert len(driver.core.worker._paused) <= 1
    driver.run()
    assert [ids_of(listener) for listener in (joined[0][0], joined[1][0], between)] == alone
