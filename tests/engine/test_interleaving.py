"""A blended prompt pauses between its layers: answers beside it go on, and it gives the same answer as alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from houses import Bench, House, Listener, ids_of, open_house

from cacheblend_cli.engine.auto.controller import controller_of
from cacheblend_cli.engine.core.sequence import RequestState
from cacheblend_cli.engine.events import Done, Limits, Text
from cacheblend_cli.engine.worker.prefill import PrefillState
from cacheblend_cli.kv.source import BadChunk
from cacheblend_cli.types import AskRequest, BlendParams

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
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("interleaving"), num_hidden_layers=LAYERS) as house:
        yield house


def asked(house: House, blend: BlendParams, **sampling: object) -> AskRequest:
    return replace(house.question("where does the harbor keeper with the parrot live?", **sampling), blend=blend)


def prefill_of(bench: Bench, state: RequestState) -> PrefillState | None:
    """What the worker has of the prompt while it is computed."""
    running = state.sequences[0].prefill if state.sequences else None
    return None if running is None else bench.stepper.worker._prefills[running.number]


def paused(bench: Bench, state: RequestState) -> bool:
    """Whether the prompt is between two of its layers."""
    prefill = prefill_of(bench, state)
    return prefill is not None and prefill._blending is not None


def until_text(bench: Bench, listener: Listener) -> None:
    while not any(isinstance(e, Text) for e in listener.events):
        bench.step()


def until_paused(bench: Bench, state: RequestState, times: int = 2) -> None:
    while times:
        bench.step()
        assert state in bench.stepper.scheduler.states
        times -= paused(bench, state)


@pytest.mark.parametrize("blend", BLENDS.values(), ids=BLENDS)
def test_a_stream_goes_on_between_the_layers_of_a_blend(house: House, blend: BlendParams) -> None:
    question = asked(house, blend, logprobs=1)
    stream = house.question("what keeps the parrot?", max_tokens=60)
    alone = Bench(house, LIMITS)
    by_itself, _ = alone.arrive(question)
    alone.run()
    streamed_alone = alone.ask(stream)

    bench = Bench(house, LIMITS)
    streaming, _ = bench.arrive(stream)
    until_text(bench, streaming)
    listener, state = bench.arrive(question)
    counts = []  # tokens of the stream, each time that the blend has paused
    while not state.num_started:
        bench.step()
        if paused(bench, state):
            counts.append(tokens_of(bench, 0))
    assert counts[-1] - counts[0] >= LAYERS // 2, "its rows are several slices"
    assert max(b - a for a, b in pairwise(counts)) == 1, "a token for each group of layers"
    bench.run()
    assert ids_of(streaming) == streamed_alone
    assert answers(listener) == answers(by_itself)


def tokens_of(bench: Bench, number: int) -> int:
    [state] = [s for s in bench.stepper.scheduler.states if s.number == number]
    output = state.sequences[0].output
    assert output is not None
    return len(output.out.token_ids)


def answers(listener: Listener) -> list[object]:
    return [(a.generated_ids, a.logprobs, a.chosen, a.recompute_fraction) for a in listener.done().answers]


@pytest.mark.parametrize("name", ["probe", "hkvd"])
def test_a_paused_blend_that_is_cancelled_gives_everything_back(house: House, name: str) -> None:
    for times in (1, 3):
        bench = Bench(house, LIMITS)
        listener, state = bench.arrive(asked(house, BLENDS[name]))
        until_paused(bench, state, times)
        prefill = prefill_of(bench, state)
        assert prefill is not None
        state.cancelled = True
        bench.step()
        assert listener.done() == Done([], "cancelled")
        assert prefill._blending is None
        bench.run()  # which checks that no block is used
        assert bench.ask(house.question())


def test_a_chunk_that_turns_bad_during_the_pause_is_computed(house: House) -> None:
    question = asked(house, BLENDS["hkvd"])
    bench = Bench(house, LIMITS)
    listener, state = bench.arrive(question)
    until_paused(bench, state)
    prefill = prefill_of(bench, state)
    assert prefill is not None

    def wait(layer: int) -> None:
        raise BadChunk(house.keys[1], "it was damaged")

    prefill._loader.wait = wait  # type: ignore[method-assign]
    bench.run()
    [answer] = listener.done().answers
    assert [use.status == "computed" for use in answer.chunks] == [i == 1 for i in range(len(house.keys))]
    assert any("it was damaged" in note for note in answer.notes)


def test_the_machine_is_measured_at_the_first_auto(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.engine.runtime.controllers.clear()
    monkeypatch.setattr("cacheblend_cli.engine.auto.speeds.SpeedFile.read", lambda file: None)
    bench = Bench(house, LIMITS)
    streaming, _ = bench.arrive(house.question("what keeps the parrot?", max_tokens=20))
    until_text(bench, streaming)
    listener, state = bench.arrive(asked(house, BLENDS["query"]), auto=True)
    assert controller_of(house.engine.runtime, state.request)._speeds is not None
    bench.run()
    [answer] = listener.done().answers
    assert answer.auto is not None
    assert streaming.done().answers[0].generated_ids
