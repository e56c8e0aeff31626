"""Speculative decoding: answers with proposals are those of a token a step, whatever is proposed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from engine_driver import CoreDriver, Listener, StoredEngine, open_stored_engine
from oracle_lookup import Oracle
from proposal_checks import (
    GREEDY,
    LIMITS,
    MOST,
    SAMPLED,
    alone,
    arrive,
    assert_mixed,
    check,
    facts,
    of_length,
    with_proposals,
)

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.core import EngineCore
from cacheblend_cli.engine.core.scheduler import Scheduler
from cacheblend_cli.engine.core.sequence import RequestState, Sequence, SequenceStatus
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Failed, Limits
from cacheblend_cli.engine.features import FEATURES
from cacheblend_cli.engine.features.speculation import Drafts, StepCosts
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.decode import GraphRunner
from cacheblend_cli.engine.worker.grammar import Grammar
from cacheblend_cli.engine.worker.memory import DeviceMemory, warm_up_graphs
from cacheblend_cli.engine.worker.worker import DecodeInput, Worker
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.types import AskRequest, BlendParams

FORM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    return Oracle(monkeypatch)


# batches, pools, ends


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("speculation"), num_hidden_layers=2) as stored:
        yield stored


def mixed_questions(stored: StoredEngine) -> list[AskRequest]:
    """Of other lengths and settings."""
    settings: list[dict[str, Any]] = [
        GREEDY | {"max_tokens": 25},
        SAMPLED | {"top_k": 20, "max_tokens": 9},
        SAMPLED | {"n": 3, "max_tokens": 12},
        SAMPLED | {"min_p": 0.02, "top_p": 0.9, "logprobs": None},
        GREEDY | {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        SAMPLED | {"logit_bias": ((7, 2.5), (9, -3.0)), "temperature": 3.0},
        SAMPLED | {"n": 2, "best_of": 4, "max_tokens": 10},
        SAMPLED | {"regex": "[a-f]{12}-[0-9]{9}", "max_tokens": 40},
        SAMPLED | {"json_schema": json.dumps(FORM), "max_tokens": 60},
        GREEDY | {"max_tokens": 1},
        GREEDY | {"max_tokens": 2},
    ]
    words = "who keeps a parrot near the harbor?".split()
    questions = [stored.question(" ".join(words[: 1 + i % 7]), **given) for i, given in enumerate(settings)]
    return [replace(q, keys=stored.keys[: i % 4]) for i, q in enumerate(questions)]


@pytest.mark.parametrize("speculate", [1, MOST, 40])
def test_answers_of_any_settings_are_the_same_together(stored: StoredEngine, oracle: Oracle, speculate: int) -> None:
    check(stored, oracle, mixed_questions(stored), speculate=speculate)
    assert min(oracle.wrong.values()) > 2


@pytest.mark.parametrize("swap_space", [0.0, 4.0], ids=["computed again", "swapped"])
def test_answers_in_a_small_pool(
    stored: StoredEngine, oracle: Oracle, swap_space: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is preempted for proposals: they are dropped where the pool has no room for all."""
    tiny = Limits(max_sequences=6, max_rows=40, pool_tokens=16 * 20, enable_prefix_caching=False)
    questions = [
        stored.question("who? " * (1 + i % 7), **SAMPLED | {"n": 1 + 2 * (i % 2), "max_tokens": 30}) for i in range(10)
    ]
    questions = [replace(q, keys=stored.keys[: i % 4]) for i, q in enumerate(questions)]
    drafts, dropped = Scheduler._drafts, list[int]()

    def count(self: Scheduler, decoding: list[Sequence]) -> Drafts:
        found = drafts(self, decoding)
        assert self.blocks.can_append([(s.paged, s.kv_len, 1 + len(found.get(s, ()))) for s in decoding if s.paged])
        dropped.append(not found and len(decoding) > 1)
        return found

    def preempt(self: Scheduler, sequence: Sequence) -> None:
        decoding = [s for s in self.with_status(SequenceStatus.RUNNING) if not s.prefilling and s.paged]
        assert not self.blocks.can_append([(s.paged, s.kv_len, 1) for s in decoding if s.paged]), "for one token each"
        whole(self, sequence)

    whole = Scheduler.preempt
    monkeypatch.setattr(Scheduler, "_drafts", count)
    monkeypatch.setattr(Scheduler, "preempt", preempt)
    driver, _ = check(stored, oracle, questions, tiny, config={"swap_space": swap_space}, speculate=12)
    assert driver.core.counts.preempted > 0
    assert driver.core.counts.failed == 0
    assert any(dropped)
    assert (driver.core.counts.recomputed > 0) == (swap_space == 0)


def test_prompts_join_and_answers_leave(stored: StoredEngine, oracle: Oracle) -> None:
    """One of them is cancelled, one comes too late; what they have said is a beginning of their answers."""
    questions = [stored.question(f"where is the parrot? {i}", **(SAMPLED if i % 2 else GREEDY)) for i in range(6)]
    questions = [replace(q, sampling=replace(q.sampling, max_tokens=30)) for q in questions]
    expected = alone(stored, questions)
    oracle.learn(expected)
    driver = CoreDriver(with_proposals(stored), replace(LIMITS, max_rows=32, max_sequences=4))
    arrived = list[tuple[Listener, RequestState]]()
    for number, question in enumerate(questions):
        arrived.append(driver.arrive(question, deadline_s=1000.0))
        for _ in range(7):
            driver.step()
        if number == 3:
            arrived[1][1].cancelled = True
            arrived[2][1].submitted -= 2000.0
    driver.run()
    for number, ((listener, _), plain) in enumerate(zip(arrived, expected, strict=True)):
        done = listener.done()
        if number in (1, 2) and done.ended:
            [whole] = plain.done().answers
            for answer in done.answers:
                assert whole.generated_ids[: len(answer.generated_ids)] == answer.generated_ids
                assert listener.text() == answer.text
        else:
            assert facts(listener) == facts(plain)
    assert {arrived[1][0].done().ended, arrived[2][0].done().ended} - {None}
    assert_mixed(driver)


def test_an_answer_ends_at_any_token_of_a_proposal(stored: StoredEngine, oracle: Oracle) -> None:
    """At max_tokens, at a token that ends it, and where a stop string is complete."""
    given = SAMPLED | {"max_tokens": 14, "temperature": 2.0, "logprobs": 0}
    [whole] = alone(stored, [stored.question(**given)])[0].done().answers
    cuts: list[dict[str, Any]] = [{"max_tokens": n} for n in range(1, 14)]
    cuts += [{"stop_ids": (token,)} for token in dict.fromkeys(whole.generated_ids)]
    cuts += [{"stop": (whole.text[at : at + 3],)} for at in range(0, len(whole.text), 2)]
    driver, listeners = check(stored, oracle, [stored.question(**given | cut) for cut in cuts])
    answers = [listener.done().answers[0] for listener in listeners]
    assert len({len(a.generated_ids) for a in answers}) > 10
    assert {a.finish_reason for a in answers} == {"stop", "length"}
    assert driver.core.counts.generated == sum(len(a.generated_ids) for a in answers)
    assert driver.core.counts.accepted == sum(a.accepted_tokens for a in answers), "nothing is taken after the end"


def test_an_answer_ends_at_the_models_own_token(stored: StoredEngine, oracle: Oracle) -> None:
    given = SAMPLED | {"max_tokens": 14, "temperature": 2.0, "ignore_eos": False}
    [whole] = alone(stored, [stored.question(**given)])[0].done().answers
    runtime = stored.engine.runtime
    for token in dict.fromkeys(whole.generated_ids[1:]):
        model = replace(runtime.model, eos_ids=frozenset({token}))
        ending = StoredEngine(Engine(type(runtime)(model, runtime.config)), stored.store, stored.keys)
        oracle.learn_answer(whole.prompt_ids, whole.generated_ids)
        [expected], driver = alone(ending, [stored.question(**given)]), CoreDriver(with_proposals(ending), LIMITS)
        [listener] = arrive(driver, [stored.question(**given)])
        driver.run()
        assert facts(listener) == facts(expected)
        assert listener.done().answers[0].finish_reason == "stop"


def test_an_answer_that_repeats_itself_ends(stored: StoredEngine, oracle: Oracle) -> None:
    given = GREEDY | {"max_tokens": 300, "ignore_eos": False, "logit_bias": ((50, 100.0),), "stop_repetition": True}
    _, [listener] = check(stored, oracle, [stored.question(**given)])
    [answer] = listener.done().answers
    assert answer.finish_reason == "repetition"
    assert len(answer.generated_ids) < 300


@pytest.mark.parametrize("budget", range(6))
def test_reasoning_ends_within_a_proposal(budget: int, reasoning: StoredEngine, oracle: Oracle) -> None:
    """The closing tag is forced, whatever is proposed."""
    questions = [
        reasoning.question(**given | {"max_tokens": 12, "reasoning_tokens": budget}) for given in (GREEDY, SAMPLED)
    ]
    _, listeners = check(reasoning, oracle, questions)
    for listener in listeners:
        [answer] = listener.done().answers
        assert answer.reasoning_tokens >= budget
        assert answer.reasoning_tokens < len(answer.generated_ids)


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory: pytest.TempPathFactory) -> StoredEngine:
    """One whose template opens the tag."""
    path = tmp_path_factory.mktemp("reasoning") / "model"
    write_checkpoint(path, "qwen2", num_hidden_layers=2)
    file = path / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    config = EngineConfig(model=str(path), block_size=16, speculate="off", template_var=("enable_thinking=true",))
    return StoredEngine(Engine.load(config), None, [])  # type: ignore[arg-type]


# hooks


def test_attention_to_chunks_is_the_same(stored: StoredEngine, oracle: Oracle) -> None:
    """It is taken at every eighth token or so, most of them proposals."""
    questions = [stored.question(**given | {"max_tokens": 60}) for given in (GREEDY, SAMPLED, SAMPLED | {"n": 2})]
    _, listeners = check(stored, oracle, questions)
    for listener in listeners:
        assert all(chunk.attention for answer in listener.done().answers for chunk in answer.chunks)


@pytest.mark.parametrize("option", ["verify", "confirm"])
def test_checks_of_an_answer_are_the_same(option: str, stored: StoredEngine, oracle: Oracle) -> None:
    questions = [replace(stored.question(**given), blend=BlendParams(mode="reuse")) for given in (GREEDY, SAMPLED)]
    _, listeners = check(stored, oracle, questions, **{option: True})
    for listener in listeners:
        [answer] = listener.done().answers
        assert (answer.verify if option == "verify" else answer.confirmation) is not None


def test_the_prefix_cache_holds_nothing_of_a_proposal(stored: StoredEngine, oracle: Oracle) -> None:
    caching = replace(LIMITS, enable_prefix_caching=True, max_rows=16)
    question = replace(stored.question("where does Mara work? " * 6, **GREEDY), blend=BlendParams(mode="full"))
    driver, [first] = check(stored, oracle, [question], caching)
    again = arrive(driver, [question])
    driver.run()
    assert driver.core.counts.prefix_cached > 0
    assert again[0].done().answers[0].generated_ids == first.done().answers[0].generated_ids


# blocks


def test_rows_write_only_to_blocks_of_their_own(
    stored: StoredEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that share their prompt's last block copy it before the first of them writes."""
    decode, sizes = Worker.decode, list[int]()

    def checked(worker: Worker, given: DecodeInput, tokens: torch.Tensor | None = None) -> Any:
        written = [table.blocks[at // worker.block_size] for at, table in zip(given.kv_lens, given.tables, strict=True)]
        assert not any(map(worker.allocator.is_shared, written))
        slots = [(block, at % worker.block_size) for block, at in zip(written, given.kv_lens, strict=True)]
        assert len(set(slots)) == len(slots), "two rows write to one place"
        sizes.append(len(slots))
        return decode(worker, given, tokens)

    monkeypatch.setattr(Worker, "decode", checked)
    questions = [of_length(stored, length, **SAMPLED | {"n": 3, "max_tokens": 40}) for length in (45, 48)]
    driver, _ = check(stored, oracle, questions, speculate=20)
    assert max(sizes) > 40
    driver.core.blocks.check_idle()


# a GPU's runner and scheduling


@pytest.mark.parametrize("least_rows", [1, 1 + MOST])
def test_graphs_compute_the_rows_of_proposals(stored: StoredEngine, oracle: Oracle, least_rows: int) -> None:
    """No graph is captured during an answer of one request."""
    questions = [stored.question(**(GREEDY | {"max_tokens": most})) for most in range(6, 20)]
    questions.append(stored.question(**SAMPLED))
    expected = alone(stored, questions)
    oracle.learn(expected)
    other = with_proposals(stored)
    decoder, captured = other.engine.runtime.decoder, list[Any]()
    pool = KVPool.of(decoder, 100, 16)
    runner = GraphRunner(decoder, pool, lambda function: captured.append(function) or function, least_rows)  # type: ignore[func-returns-value]
    warm_up_graphs(runner, 1024, least_rows)
    warm = len(captured)
    assert warm == (1 if least_rows == 1 else 2)
    driver = CoreDriver(other, LIMITS)
    driver.core = EngineCore(other.engine.runtime, LIMITS, DeviceMemory(pool, runner), FEATURES)
    for question, plain in zip(questions, expected, strict=True):
        [listener] = arrive(driver, [question])
        driver.run()
        [ours], [theirs] = listener.done().answers, plain.done().answers
        assert (ours.generated_ids, ours.text, ours.finish_reason) == (
            theirs.generated_ids,
            theirs.text,
            theirs.finish_reason,
        )
        found, known = ([p.logprob for p in answer.logprobs] for answer in (ours, theirs))
        assert found == pytest.approx(known, abs=1e-4)
    assert_mixed(driver)
    assert (len(captured) == warm) == (least_rows > 1)


def test_by_default_a_gpu_computes_ahead_instead(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "async_scheduling", True)
    cores = [CoreDriver(with_proposals(stored, asked), LIMITS).core for asked in ("auto", "off", 3)]
    assert [core.scheduler.speculation is None for core in cores] == [True, True, False]
    assert [core._outputs._is_async for core in cores] == [True, True, False]


def test_steps_ahead_have_no_proposals(stored: StoredEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(stored, mixed_questions(stored))
    oracle.learn(expected)
    monkeypatch.setattr(Runtime, "async_scheduling", True)
    for asked in ("auto", MOST):
        driver = CoreDriver(with_proposals(stored, asked), LIMITS)
        listeners = arrive(driver, mixed_questions(stored))
        driver.run()
        assert [facts(listener) for listener in listeners] == [facts(listener) for listener in expected]
        assert (driver.core.counts.proposed > 0) == (asked != "auto")


# by default


def test_by_default_free_rows_are_proposed_and_full_batches_are_not(
    stored: StoredEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCosts, "record", lambda costs, num_rows, seconds: None)
    monkeypatch.setattr(StepCosts, "known", True)
    monkeypatch.setattr(StepCosts, "save", lambda costs: None)
    questions = [stored.question(**GREEDY | {"max_tokens": 30})]
    expected = alone(stored, questions)
    oracle.learn(expected)
    for each, proposes in ((0.0, True), (1.0, False)):
        monkeypatch.setattr(StepCosts, "__call__", lambda costs, num_rows, each=each: 1 + each * (num_rows - 1))
        driver = CoreDriver(with_proposals(stored, "auto"), LIMITS)
        listeners = arrive(driver, questions)
        driver.run()
        assert [facts(listener) for listener in listeners] == [facts(listener) for listener in expected]
        assert (driver.core.counts.proposed > 0) == proposes


def test_the_first_step_has_no_proposals(stored: StoredEngine, oracle: Oracle) -> None:
    """By default it is timed alone. A step of prompts is not timed."""
    oracle.learn(alone(stored, [stored.question(**GREEDY)]))
    driver = CoreDriver(with_proposals(stored, "auto"), LIMITS)
    speculation = driver.core.scheduler.speculation
    assert speculation is not None
    [listener] = arrive(driver, [stored.question(**GREEDY)])
    while not speculation.costs.known:
        assert driver.core.counts.proposed == 0
        driver.step()
    assert not driver.core.scheduler.with_status(SequenceStatus.WAITING)
    driver.run()
    assert listener.done().answers[0].generated_ids


def test_a_failing_draw_of_a_proposal_ends_its_request_only(
    stored: StoredEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [stored.question(**GREEDY), stored.question(**SAMPLED | {"regex": "[a-f]{30}"})]
    expected = alone(stored, questions)
    oracle.learn(expected)
    allowed, calls = Grammar.allowed, list[int]()

    def fails(grammar: Grammar, logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("no more")
        return allowed(grammar, logits)

    monkeypatch.setattr(Grammar, "allowed", fails)
    driver = CoreDriver(with_proposals(stored), LIMITS)
    listeners = arrive(driver, questions)
    driver.run()
    assert facts(listeners[0]) == facts(expected[0])
    assert isinstance(listeners[1].last.result(0), Failed)
    assert driver.core.counts.failed == 1
