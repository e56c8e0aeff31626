"""Answers do not depend on what else is made beside them, nor on being preempted; no block is lost by any of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
from engine_driver import SAMPLING, CoreDriver, Listener, StoredEngine, ids_of, open_stored_engine

from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.engine.core.sequence import SequenceStatus
from cacheblend_cli.engine.events import Failed, Limits
from cacheblend_cli.kv.source import BadChunk
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

WORDS = "where does Mara work who keeps a parrot at home near the harbor what is it about".split()
LAZY = Limits(max_sequences=4, enable_prefix_caching=False, pool_tokens=4096)
TINY = Limits(max_sequences=6, max_rows=40, pool_tokens=16 * 20, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("beside"), num_hidden_layers=2) as stored:
        yield stored


def random_question(rng: random.Random, keys: list[bytes]) -> AskRequest:
    named = rng.sample(keys, rng.randint(0, min(4, len(keys))))
    blend = BlendParams(
        mode=rng.choice(("blend", "blend", "reuse", "full")),
        ratio=rng.choice((0.1, 0.4, 1.0)),
        selector=rng.choice(("query", "hkvd", "first", "query:2+hkvd")),
        correction=rng.choice(("regression", "regression", "none")),
    )
    sampling = SamplingParams(
        max_tokens=rng.randint(1, 10),
        temperature=rng.choice((0.0, 1.0, 3.0)),
        seed=rng.randrange(1000),
        repetition_penalty=rng.choice((1.0, 1.3)),
        n=rng.choice((1, 1, 1, 1, 1, 3)),
        ignore_eos=rng.random() < 0.8,
    )
    return AskRequest(" ".join(rng.choices(WORDS, k=rng.randint(1, 30))), named, blend, sampling)


@pytest.mark.parametrize("prefill_s", [inf, 0.0], ids=["slices", "layers"])
@pytest.mark.parametrize("count", [50, pytest.param(400, marks=pytest.mark.torture)])
def test_answers_do_not_depend_on_the_batch(stored: StoredEngine, count: int, prefill_s: float) -> None:
    """Random questions alone, and at once in a pool that is far too small for them. Some are preempted,
    others are cancelled meanwhile, and all give the same tokens."""
    rng = random.Random(7)
    questions = [random_question(rng, stored.keys) for _ in range(count)]
    alone = CoreDriver(stored, replace(TINY, pool_tokens=4096))
    expected = [alone.ask(question) for question in questions]
    assert alone.core.counts.preempted == 0

    together, listeners, dropped = CoreDriver(stored, TINY, prefill_s), [], []
    left = list(questions)
    while left or together.core.busy:
        for _ in range(rng.choice((0, 0, 1, 3))):
            if left:
                listeners.append(together.arrive(left.pop(0), priority=rng.choice((0, 0, 1)))[0])
            if rng.random() < 0.1:
                dropped.append(together.arrive(random_question(rng, stored.keys)))
        if dropped and rng.random() < 0.05:
            rng.choice(dropped)[1].cancelled = True
        together.step()
    together.run()
    assert [ids_of(listener) for listener in listeners] == expected
    assert together.seen >= {SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED}
    counts = together.core.counts
    assert counts.preempted > count // 10
    assert counts.cancelled > 0
    assert counts.finished + counts.cancelled == len(questions) + len(dropped)
    assert counts.failed == 0


@pytest.mark.parametrize("family", ["mistral-window", "qwen2", "qwen3-mqa", "qwen3-moe", "qwen2-moe", "olmo", "olmoe"])
def test_answers_of_every_family_do_not_depend_on_the_batch(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """To the bit: log-probabilities are compared, too. Those with experts send every row elsewhere; olmo and olmoe are
    transformers' own layers."""
    with open_stored_engine(tmp_path_factory.mktemp(family), family, pages=2, num_hidden_layers=2) as stored:
        rng = random.Random("qwen2")
        questions = [random_question(rng, stored.keys[:3]) for _ in range(9)]
        questions = [replace(q, sampling=replace(q.sampling, logprobs=0)) for q in questions]
        small = replace(TINY, pool_tokens=16 * (12 if family == "olmoe" else 14))  # so that some are preempted
        alone, together = CoreDriver(stored, replace(TINY, pool_tokens=4096)), CoreDriver(stored, small)
        expected = [alone.arrive(question)[0] for question in questions[:1]]
        for question in questions[1:]:
            alone.run()
            expected.append(alone.arrive(question)[0])
        alone.run()
        listeners = [together.arrive(question)[0] for question in questions]
        together.run()
        assert [ids_of(listener) for listener in listeners] == [ids_of(listener) for listener in expected]
        found, wanted = ([a.logprobs for e in all_of for a in e.done().answers] for all_of in (listeners, expected))
        assert found == wanted
        assert together.core.counts.preempted > 0


def test_side_by_side_is_as_ask_alone(stored: StoredEngine) -> None:
    driver = CoreDriver(stored, Limits(enable_prefix_caching=False))
    question = stored.question()
    alone = stored.engine.run_alone(stored.store, question)
    listeners = [driver.arrive(question)[0] for _ in range(5)]
    driver.run()
    assert [ids_of(listener) for listener in listeners] == [[alone.generated_ids]] * 5


def test_blocks_of_one_token_are_nobody_elses(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A batch is filled up with rows that write somewhere, too."""
    with open_stored_engine(tmp_path_factory.mktemp("one"), block_size=1, num_hidden_layers=2) as stored:
        question = stored.question(logprobs=0)
        alone = stored.engine.run_alone(stored.store, question)
        driver = CoreDriver(stored, Limits(enable_prefix_caching=False, pool_tokens=1024))
        listener, _ = driver.arrive(question)
        driver.run()
        [answer] = listener.done().answers
        assert [p.logprob for p in answer.logprobs] == pytest.approx([p.logprob for p in alone.logprobs], abs=1e-4)


def test_a_long_prompt_is_prefilled_between_the_tokens_of_others(stored: StoredEngine) -> None:
    driver = CoreDriver(stored, replace(TINY, max_rows=32, pool_tokens=4096))
    short, _ = driver.arrive(AskRequest("who?", [], BlendParams(mode="full"), replace(SAMPLING, max_tokens=60)))
    driver.step()
    long = AskRequest("Mara works in Bergen. " * 20, stored.keys, BlendParams(mode="full"), SAMPLING)
    listener, _ = driver.arrive(long)
    between, pieces = [], 0
    while not any(hasattr(e, "text") for e in listener.events):
        before = len(short.events)
        driver.step()
        between.append(len(short.events) > before)
        pieces += 1
    assert pieces > 10
    assert sum(between) >= pieces // 3  # a token of text is not said at every step
    driver.run()
    whole = CoreDriver(stored, Limits(max_rows=4096, enable_prefix_caching=False)).ask(long)
    assert ids_of(listener) == whole


def test_a_request_that_can_never_fit_is_refused_with_the_limit(stored: StoredEngine) -> None:
    driver = CoreDriver(stored, TINY)
    listener, _ = driver.arrive(AskRequest("who?", stored.keys, BlendParams(), replace(SAMPLING, max_tokens=600)))
    last = listener.last.result(0)
    assert isinstance(last, Failed)
    assert str(driver.core.blocks.most_tokens) in str(last.error)
    assert last.error.hint == "ask with fewer chunks or a smaller --max-tokens"  # serve has no flag for more room


def test_a_bad_chunk_is_computed(stored: StoredEngine, tmp_path_factory: pytest.TempPathFactory) -> None:
    with open_stored_engine(tmp_path_factory.mktemp("bad")) as other:
        question = other.question()
        driver = CoreDriver(other, Limits(enable_prefix_caching=False))
        plain = driver.ask(replace(question, blend=BlendParams(mode="full")))
        listener, _ = driver.arrive(replace(question, blend=BlendParams(ratio=1.0)))
        other.store.evict_chunks(other.keys[:1])
        driver.run()
        assert ids_of(listener) == plain
        [answer] = listener.done().answers
        assert any("computed" in note for note in answer.notes)


def test_the_best_of_several_is_given(stored: StoredEngine) -> None:
    driver = CoreDriver(stored, Limits(enable_prefix_caching=False))
    sampling = replace(SAMPLING, temperature=2.0, seed=3, logprobs=0)
    listener, _ = driver.arrive(replace(stored.question(), sampling=replace(sampling, n=4)))
    driver.run()
    answers = listener.done().answers
    means = [sum(p.logprob for p in a.logprobs) / len(a.logprobs) for a in answers]
    best = sorted(zip(means, (a.generated_ids for a in answers), strict=True), reverse=True)[:2]
    chosen = driver.ask(replace(stored.question(), sampling=replace(sampling, n=2, best_of=4)))
    assert chosen == [ids for _, ids in best]


def test_a_stop_token_ends_an_answer(stored: StoredEngine) -> None:
    driver = CoreDriver(stored, Limits(enable_prefix_caching=False))
    [ids] = driver.ask(stored.question())
    [short] = driver.ask(stored.question(stop_ids=(ids[2],)))
    assert short == ids[: ids.index(ids[2]) + 1]


def test_many_answers_to_one_question_leave_places_for_others(stored: StoredEngine) -> None:
    """They are made in waves of at most half the places, with the same seeds as at once."""
    sampling = SamplingParams(max_tokens=4, temperature=2.0, seed=3, n=9, ignore_eos=True)
    question = replace(stored.question(), sampling=sampling)
    at_once = CoreDriver(stored, Limits(max_sequences=32, enable_prefix_caching=False)).ask(question)
    driver = CoreDriver(stored, Limits(max_sequences=4, enable_prefix_caching=False))
    many, _ = driver.arrive(question)
    one, _ = driver.arrive(stored.question(max_tokens=2))
    while not one.last.done():
        driver.step()
    assert not many.last.done()
    driver.run()
    assert ids_of(many) == at_once


@pytest.mark.parametrize(("dtype", "width"), [("float32", 96), ("bfloat16", 128)])
def test_short_prompts_share_a_launch_and_answer_as_alone(
    dtype: str, width: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Fresh ones, some behind a chunk that is exact, one that is blended, one that is longer than a launch, one in
    several answers.

    width: of the MLP; with multiples of 64 alone, few rows are decoded as they are, where the CPU has AVX-512."""
    config = {"num_hidden_layers": 2, "intermediate_size": width}
    with open_stored_engine(tmp_path_factory.mktemp(dtype), pages=2, dtype=dtype, **config) as stored:
        rng = random.Random(3)
        questions = [
            AskRequest(
                " ".join(rng.choices(WORDS, k=rng.choice((20, 1, 9, 33)))),
                rng.sample(stored.keys, rng.choice((0, 0, 1, 2))),
                BlendParams(ratio=0.4),
                SamplingParams(max_tokens=5, temperature=rng.choice((0.0, 2.0)), seed=i, n=1 + i % 2, logprobs=1),
            )
            for i in range(16)
        ]
        limits = Limits(max_sequences=24, max_rows=96, pool_tokens=8192)
        alone, together = CoreDriver(stored, limits), CoreDriver(stored, limits)
        expected = []
        for question in questions:
            listener, _ = alone.arrive(question)
            alone.run()
            expected.append(answers_of(listener))
        listeners = [together.arrive(question)[0] for question in questions]
        together.run()
        assert [answers_of(listener) for listener in listeners] == expected
        assert alone.core.counts.joined == 0
        assert together.core.counts.joined >= 6


def answers_of(listener: Listener) -> list[object]:
    return [(a.generated_ids, a.logprobs) for a in listener.done().answers]


def two_short_prompts(stored: StoredEngine) -> tuple[CoreDriver, list[Listener], list[list[int]]]:
    """A driver where they wait to share a launch, and the tokens that each gets alone."""
    good = stored.question("who keeps a parrot at home near the harbor who keeps a parrot at home")
    asked = [replace(good, keys=stored.keys[:1]), replace(good, keys=[])]
    expected = [CoreDriver(stored, LAZY).ask(question) for question in asked]
    driver = CoreDriver(stored, LAZY)
    return driver, [driver.arrive(question)[0] for question in asked], expected


def test_a_bad_chunk_in_a_shared_launch_concerns_one_prompt(stored: StoredEngine) -> None:
    driver, listeners, expected = two_short_prompts(stored)
    worker = driver.core.worker

    def fails(numbers: list[int], max_rows: int, waits: bool) -> list[PrefillResult]:
        if len(numbers) == 1:
            return type(worker).prefill(worker, numbers, max_rows, waits)
        prefill = worker._prefills[numbers[0]]

        def wait(layer: int) -> None:
            raise BadChunk(stored.keys[0], "it was damaged")

        prefill._loader.wait = wait  # type: ignore[method-assign]
        return type(worker).prefill(worker, numbers, max_rows, waits)

    worker.prefill = fails  # type: ignore[method-assign, assignment]
    driver.run()
    assert [ids_of(listener) for listener in listeners] == expected
    damaged, whole = (listener.done().answers[0] for listener in listeners)
    assert any("it was damaged" in note for note in damaged.notes)
    assert not whole.notes
    assert driver.core.counts.joined == 0


def test_prompts_of_a_launch_that_failed_late_are_computed_alone(stored: StoredEngine) -> None:
    driver, listeners, expected = two_short_prompts(stored)
    worker = driver.core.worker

    def fails(numbers: list[int], max_rows: int, waits: bool) -> list[PrefillResult]:
        if len(numbers) == 1:
            return type(worker).prefill(worker, numbers, max_rows, waits)
        last = worker._prefills[numbers[-1]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(last, "_computed", lambda *given: 1 / 0)  # the first has its output then
            return type(worker).prefill(worker, numbers, max_rows, waits)

    worker.prefill = fails  # type: ignore[method-assign, assignment]
    driver.run()
    assert [ids_of(listener) for listener in listeners] == expected
    assert driver.core.counts.joined == 0


@pytest.mark.parametrize("blocks", [0, 12])
def test_kv_that_the_swap_space_has_no_room_for_is_computed_again(stored: StoredEngine, blocks: int) -> None:
    """To the bit: log-probabilities are compared, too."""
    rng = random.Random(11)
    questions = [random_question(rng, stored.keys) for _ in range(10)]
    questions = [
        replace(q, sampling=replace(q.sampling, n=3 if i % 2 else 1, max_tokens=20, ignore_eos=True, logprobs=0))
        for i, q in enumerate(questions)
    ]
    alone, together = CoreDriver(stored, replace(TINY, pool_tokens=4096)), CoreDriver(stored, TINY)
    expected = []
    for question in questions:
        listener, _ = alone.arrive(question)
        alone.run()
        expected.append(answers_of(listener))
    scheduler = together.core.scheduler
    scheduler.swap_blocks = blocks
    listeners = []
    for number, question in enumerate(questions):
        listeners.append(together.arrive(question, verify=number % 10 == 0)[0])
        together.step()
        assert scheduler.num_swapped <= blocks or any(
            s.state.parent for s in scheduler.with_status(SequenceStatus.SWAPPED)
        )
    together.run()
    assert [answers_of(listener) for listener in listeners] == expected
    assert together.core.counts.recomputed > 0
    assert (SequenceStatus.SWAPPED in together.seen) or not blocks


def test_answers_begin_only_where_all_fit_the_pool_and_the_swap_space(stored: StoredEngine) -> None:
    question = replace(stored.question(max_tokens=60), keys=stored.keys[:1])
    longest = -(-(stored.request(question).plan.num_tokens + 60) // 16)  # blocks of a prompt and its answer
    counts = []
    for blocks in (0, 1000):
        driver = CoreDriver(stored, replace(TINY, pool_tokens=16 * (2 * longest + 2)))
        driver.core.scheduler.swap_blocks = blocks
        for _ in range(3):
            driver.arrive(question)
        most = 0
        while driver.core.busy:
            driver.step()
            most = max(most, len(driver.core.scheduler.with_status(SequenceStatus.RUNNING)))
        counts.append((most, driver.core.counts.preempted))
    assert counts[0] == (2, 0)
    assert counts[1][0] == 3
    assert counts[1][1] > 0
