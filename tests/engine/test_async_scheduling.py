"""Async scheduling, as on a GPU: a step is queued before the host knows the last tokens, and answers are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_driver import SAMPLING, CoreDriver, Listener, StoredEngine, ids_of, open_stored_engine

from cacheblend_cli.engine.core.sequence import SequenceStatus
from cacheblend_cli.engine.events import Done, Limits, Token
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker import decode
from cacheblend_cli.engine.worker.decode import GraphRunner
from cacheblend_cli.engine.worker.memory import DeviceMemory
from cacheblend_cli.engine.worker.sampling import Draw
from cacheblend_cli.engine.worker.worker import DecodeInput, TableInput, Worker
from cacheblend_cli.kv.block_table import BlockTable
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.types import AskRequest, BlendParams, Piece

WORDS = "where does Mara work who keeps a parrot at home near the harbor what is it about".split()
LAZY = Limits(max_sequences=6, enable_prefix_caching=False, pool_tokens=4096)
SMALL = Limits(max_sequences=6, max_rows=40, pool_tokens=16 * 16, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("async"), "mistral-window", num_hidden_layers=2) as stored:
        yield stored


class Order:
    """The order of decode steps, by their batch size, negative if queued before their tokens were known; and of tokens
    read by the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str | int] = []
        run, fetch = Worker.decode, Draw.fetch

        def decode(worker: Worker, given: DecodeInput, tokens: torch.Tensor | None = None) -> Any:
            assert (tokens is None) == bool(given.token_ids)
            self.events.append(len(given.kv_lens) * (1 if tokens is None else -1))
            return run(worker, given, tokens)

        def read(draw: Draw) -> Any:
            self.events.append("read")
            return fetch(draw)

        monkeypatch.setattr(Worker, "decode", decode)
        monkeypatch.setattr(Draw, "fetch", read)
        monkeypatch.setattr(Runtime, "async_scheduling", True)

    @property
    def ahead(self) -> list[int]:
        return [-event for event in self.events if isinstance(event, int) and event < 0]


def facts(listener: Listener) -> list[object]:
    """Everything in a request's events that users see."""
    done = listener.done()
    said = [event for event in listener.events if not isinstance(event, Done)]
    answers = [
        (a.generated_ids, a.text, a.finish_reason, a.logprobs, [c.attention for c in a.chunks]) for a in done.answers
    ]
    return [said, answers, done.ended]


def test_a_token_is_read_once_the_next_step_is_queued(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(monkeypatch)
    [ids] = CoreDriver(stored, LAZY).ask(stored.question(max_tokens=5))
    assert len(ids) == 5
    # the first token as soon as it is drawn; nothing is computed after the last one
    assert order.events == ["read", 1, -1, "read", -1, "read", -1, "read", "read"]


def random_question(rng: random.Random, keys: Sequence[bytes], texts: Sequence[str]) -> AskRequest:
    sampling = replace(
        SAMPLING,
        max_tokens=rng.choice((1, 2, 12, 25)),
        temperature=rng.choice((0.0, 1.0, 3.0)),
        seed=rng.randrange(1000),
        repetition_penalty=rng.choice((1.0, 1.3)),
        logit_bias=rng.choice(((), ((7, 2.5), (9, -3.0)))),
        logprobs=rng.choice((None, 2)),
        n=rng.choice((1, 1, 1, 3)),
        stop=tuple(rng.sample(texts, rng.choice((0, 0, 2)))),
        stop_ids=tuple(rng.sample(range(300), rng.choice((0, 0, 30)))),
    )
    blend = BlendParams(mode=rng.choice(("blend", "full")), ratio=rng.choice((0.1, 1.0)))
    return AskRequest(" ".join(rng.choices(WORDS, k=rng.randint(1, 30))), rng.sample(keys, 2), blend, sampling)


def test_answers_are_those_of_plain_scheduling(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random questions that end at any token, for any reason: alone, and at once with some preempted or cancelled."""
    rng = random.Random(3)
    # words that this model generates, so that stop strings occur
    texts = [
        e.text
        for e in answered(stored, stored.question(max_tokens=60, temperature=1.0, seed=1)).events
        if isinstance(e, Piece)
    ]
    questions = [random_question(rng, stored.keys, [t for t in texts if t.strip()]) for _ in range(40)]
    plain = CoreDriver(stored, LAZY)
    expected = [facts(answered(stored, question, plain)) for question in questions]
    order = Order(monkeypatch)
    ahead = CoreDriver(stored, LAZY)
    assert [facts(answered(stored, question, ahead)) for question in questions] == expected
    assert ahead.core.counts.generated == plain.core.counts.generated
    assert len(order.ahead) > 100

    order.events.clear()
    together, listeners, left, dropped = CoreDriver(stored, SMALL), list[Listener](), list(questions), list[Any]()
    while left or together.core.busy:
        if left and rng.random() < 0.6:
            listeners.append(together.arrive(left.pop(0), priority=rng.choice((0, 1)), verify=rng.random() < 0.1)[0])
            if rng.random() < 0.3:
                dropped.append(together.arrive(replace(questions[0], sampling=replace(SAMPLING, max_tokens=25)))[1])
        if dropped and rng.random() < 0.1:
            dropped.pop(0).cancelled = True
        together.step()
    together.run()
    assert [[a[0] for a in facts(found)[1]] for found in listeners] == [[a[0] for a in of[1]] for of in expected]  # type: ignore[attr-defined]
    counts = together.core.counts
    assert together.seen >= {SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED}
    assert counts.preempted > 3
    assert counts.cancelled > 0
    assert counts.failed == 0
    assert max(order.ahead) > 2
    assert len(order.ahead) > 30


def answered(stored: StoredEngine, question: AskRequest, driver: CoreDriver | None = None) -> Listener:
    driver = driver or CoreDriver(stored, LAZY)
    listener, _ = driver.arrive(question)
    driver.run()
    return listener


def test_what_is_computed_after_the_end_is_not_kept(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that ends early, in a pool that keeps a prefix cache, and the same question again."""
    [ids] = CoreDriver(stored, LAZY).ask(stored.question(max_tokens=20))
    question = stored.question(max_tokens=20, stop_ids=(ids[7],))
    order = Order(monkeypatch)
    driver = CoreDriver(stored, replace(LAZY, enable_prefix_caching=True))
    used = []
    for _ in range(3):
        order.events.clear()
        assert driver.ask(question) == [ids[: ids.index(ids[7]) + 1]]
        used.append((driver.core.blocks.space.allocator.num_cached, driver.core.counts.generated))
        if ids.index(ids[7]) == 7:
            assert order.events.count("read") == 8
            assert [event for event in order.events if event != "read"] == [1] + [-1] * 7  # one step too many
    assert len({cached for cached, _ in used}) == 1
    assert [count for _, count in used] == [used[0][1] * n for n in (1, 2, 3)]


def test_a_batch_goes_on_while_one_of_it_ends(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw that is dropped takes nothing from the others' generators."""
    questions = [stored.question(max_tokens=24, temperature=2.0, seed=seed) for seed in range(3)]
    plain = [ids_of(answered(stored, question))[0] for question in questions]
    ended = replace(questions[1], sampling=replace(questions[1].sampling, stop_ids=(plain[1][9],)))
    order, driver = Order(monkeypatch), CoreDriver(stored, LAZY)
    listeners = [driver.arrive(question)[0] for question in (questions[0], ended, questions[2])]
    driver.run()
    expected = [plain[0], plain[1][: plain[1].index(plain[1][9]) + 1], plain[2]]
    assert [ids_of(listener)[0] for listener in listeners] == expected
    assert {2, 3} <= set(order.ahead)


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_an_answer_that_is_cut_keeps_what_was_drawn(
    stored: StoredEngine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    [whole] = CoreDriver(stored, LAZY).ask(stored.question(max_tokens=40))
    monkeypatch.setattr(Runtime, "async_scheduling", True)
    driver = CoreDriver(stored, LAZY)
    listener, state = driver.arrive(stored.question(max_tokens=40), deadline_s=1000.0)
    for _ in range(9):
        driver.step()
    output = state.sequences[0].output
    assert output is not None
    known = len(output.out.token_ids)
    if how == "cancelled":
        state.cancelled = True
    else:
        state.submitted -= 2000.0
    driver.run()
    done = listener.done()
    assert done.ended == how
    assert done.answers[0].generated_ids == whole[: known + 1]
    assert listener.text() == done.answers[0].text


def test_a_token_can_be_had_before_the_next_step(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before other work in the engine's thread."""
    [ids] = CoreDriver(stored, LAZY).ask(stored.question(max_tokens=20, logprobs=0))
    monkeypatch.setattr(Runtime, "async_scheduling", True)
    driver = CoreDriver(stored, LAZY)
    listener, state = driver.arrive(stored.question(max_tokens=20, logprobs=0))
    for n in range(40):
        driver.step()
        if n % 3 == 0:
            for _, event in driver.core.flush():
                listener(event)
            assert not driver.core.flush()
            output = state.sequences[0].output
            if not listener.last.done() and output is not None:
                assert sum(isinstance(e, Token) for e in listener.events) == len(output.out.token_ids)
    assert listener.done().answers[0].generated_ids == ids


def test_where_the_host_decides_the_next_token_it_is_known_first(
    stored: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order(monkeypatch)
    answered(stored, stored.question(regex="[a-f]{3}-[0-9]{2}", max_tokens=40))
    driver = CoreDriver(stored, LAZY)
    driver.arrive(stored.question(max_tokens=6), verify=True)
    driver.run()
    assert not order.ahead


def test_an_answer_to_confirm_is_decoded_ahead(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    question = replace(stored.question(max_tokens=6), blend=BlendParams(mode="reuse"))

    def confirmed() -> list[object]:
        driver = CoreDriver(stored, LAZY)
        listener, _ = driver.arrive(question, confirm=True)
        driver.run()
        [answer] = listener.done().answers
        assert answer.confirmation is not None
        return [*facts(listener), answer.confirmation.blended_answer, answer.confirmation.first_difference]

    plain, order = confirmed(), Order(monkeypatch)
    assert confirmed() == plain
    assert len(order.ahead) >= 4, "the draft's steps after the first"


def test_a_failed_step_comes_after_its_tokens(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that the failing step computes was drawn before it, and is still shown."""
    [ids] = CoreDriver(stored, LAZY).ask(stored.question(max_tokens=20, logprobs=0))
    order, driver = Order(monkeypatch), CoreDriver(stored, LAZY)
    run = Worker.decode

    def fails(*given: Any) -> Any:
        if len(order.ahead) == 4:
            raise RuntimeError("the device is lost")
        return run(*given)

    monkeypatch.setattr(Worker, "decode", fails)
    listener, _ = driver.arrive(stored.question(max_tokens=20, logprobs=0))
    driver.run()
    assert driver.core.counts.failed == 1
    assert [e.logprob.id for e in listener.events if isinstance(e, Token)] == ids[:6]


def test_a_batch_that_goes_on_is_not_uploaded_again(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph: block tables when a block is added, positions and lengths never."""
    uploads, plain = [], decode.upload

    def counted(*given: Any) -> Any:
        uploads.append(given[0])
        return plain(*given)

    monkeypatch.setattr(decode, "upload", counted)
    decoder = stored.engine.model.decoder
    pool = KVPool.of(decoder, 32, 16)
    for cache in pool.tensors:
        cache.zero_()
    worker = Worker(decoder, DeviceMemory(pool, GraphRunner(decoder, pool, lambda function: function)))
    tables = [BlockTable(worker, pool.allocator.allocate(1)) for _ in range(3)]

    def step(lens: Sequence[int], of: Sequence[BlockTable]) -> torch.Tensor:
        for table, kv_len in zip(of, lens, strict=True):
            table.ensure(kv_len + 1)
        given = DecodeInput((), tuple(lens), tuple(map(TableInput.of, of)), (False,) * len(of))
        return worker.decode(given, torch.arange(len(of))).logits.clone()

    counts = []
    for n in range(40):
        step([n, n + 3, n + 5], tables)
        counts.append(len(uploads))
        uploads.clear()
    assert counts[0] == 3
    assert [n for n, count in enumerate(counts) if count] == [0, 11, 13, 16, 27, 29, 32]
    assert max(counts[1:]) == 1
    batch = step([40, 43, 45], tables)
    pairs = step([40, 45], [tables[0], tables[2]])  # positions go back, another bucket
    assert torch.allclose(batch[0], pairs[0], atol=1e-5)
    uploads.clear()
    again = step([40, 43, 45], tables)  # as other work in the same runner leaves it
    assert len(uploads) == 2
    assert torch.allclose(batch, again, atol=1e-5)


def test_rows_of_a_batch_are_two_uploads(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sequences decode eagerly: positions with slots, and block tables."""
    from cacheblend_cli.kv import rows

    uploads, plain = [], rows.upload
    monkeypatch.setattr(rows, "upload", lambda *given: (uploads.append(given), plain(*given))[1])
    decoder = stored.engine.model.decoder
    pool = KVPool.of(decoder, 32, 16)
    sequences = [pool.new_sequence(n) for n in (20, 33, 7)]
    found = rows.next_rows(decoder, sequences, [17, 32, 0])
    assert len(uploads) == 2
    expected = [s.slots(torch.tensor([n]))[0] for s, n in zip(sequences, (17, 32, 0), strict=True)]
    assert found.slots.tolist() == [int(slot) for slot in expected]
    assert found.positions.tolist() == [17, 32, 0]
    assert found.attention.kv_lens.tolist() == [18, 33, 1]
