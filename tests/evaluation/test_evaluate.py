"""Every sample under every setting: measurements, their reference, and resuming a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_store import ChunkStore
from checkpoints import write_checkpoint

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.errors import UsageError
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.evaluate import FULL, NOISE_FLOOR, EvaluateOptions, evaluate
from cacheblend_cli.evaluation.measures import prefill_in_pieces, relative_rmse, run_full
from cacheblend_cli.evaluation.records import RecordFile
from cacheblend_cli.evaluation.samples import Context, Sample, pages
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.evaluation.summary import summarise
from cacheblend_cli.types import AskOptions, AskRequest, BlendParams, SamplingParams

PARAGRAPHS = [
    "Mara leads billing. She works in Bergen.\n\n",
    "The harbor keeps a parrot. Jonas works near the lead of billing.\n\n",
    "While Mara works, the parrot is at home in the harbor. ",
]


TOKENS = 12
REUSE = Setting("reuse", BlendParams(mode="reuse"))
SOME = Setting("some", BlendParams(ratio=0.3))
ALL = Setting("all", BlendParams(ratio=1.0))


def sample(
    order: tuple[int, ...], question: str = "Who leads billing?", answers: tuple[str, ...] = ("Mara",)
) -> Sample:
    texts = [PARAGRAPHS[i] for i in order]
    return Sample(question, answers, pages(["a", "a", "b"][: len(order)], texts), {"hops": len(order)})


SAMPLES = [sample((0, 1, 2)), sample((2, 0, 1), "Where does Mara work?"), sample((1, 2))]


@dataclass(frozen=True)
class Setup:
    """A random model in fp32 and an empty store."""

    engine: Engine
    store: ChunkStore


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("eval-model") / "model"
    write_checkpoint(path, "qwen3", seed=3)
    return Engine.load(EngineConfig(model=str(path), device="cpu", dtype="float32", block_size=16))


@pytest.fixture
def setup(engine: Engine, tmp_path: Path) -> Iterator[Setup]:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        yield Setup(engine, store)


def test_full_repair_is_full_prefill_and_reuse_is_not(setup: Setup) -> None:
    results = evaluate(setup.engine, setup.store, SAMPLES, [REUSE, ALL, NOISE_FLOOR], EvaluateOptions(TOKENS))
    assert list(results.by_label) == ["full prefill", "reuse", "all", "noise floor"]
    for label in ("all", "noise floor"):
        for record in results.by_label[label]:
            assert record.same_answer
            assert all(record.top1)
            assert max(record.kl) < 1e-8
            assert max(record.k_error + record.v_error + record.attention_error) < 1e-4
    for record in results.by_label["reuse"]:
        assert max(record.kl) > 1e-4
        assert record.k_error[0] < 1e-6 < record.k_error[2]  # layer 0 depends on the token alone
        assert len(record.kl) == len(record.top1) <= TOKENS
        assert len(record.attention_error) == setup.engine.model.spec.num_layers


@pytest.mark.parametrize("setting", [REUSE, SOME, ALL])
def test_answers_budgets_and_first_tokens_are_those_of_ask(setup: Setup, setting: Setting) -> None:
    """Also where the greedy answer leaves full prefill's: random weights disagree soon."""
    results = evaluate(setup.engine, setup.store, SAMPLES, [setting], EvaluateOptions(TOKENS))
    chunks = SampleChunks(setup.engine, setup.store)
    differ = 0
    for item, record in zip(SAMPLES, results.by_label[setting.label], strict=True):
        answer = setup.engine.run_alone(setup.store, AskRequest(item.question, chunks.keys(item, "sink"), setting.blend, SamplingParams(max_tokens=TOKENS)), AskOptions(verify=True))  # fmt: skip
        assert record.answer == answer.text
        assert record.recompute_fraction == answer.recompute_fraction
        assert record.prompt_tokens == answer.prompt_tokens
        assert answer.verify is not None
        assert record.kl[0] == pytest.approx(answer.verify.kl, abs=1e-6)
        kl = record.kl[: record.top1.index(False) + 1] if False in record.top1 else record.kl
        assert sum(kl) / len(kl) == pytest.approx(answer.verify.answer_kl, abs=1e-6)
        assert record.same_answer == answer.verify.same_answer
        differ += not record.same_answer
    assert differ > 0 or setting is ALL


def test_a_page_in_order_is_exact_when_collected_in_its_document(setup: Setup) -> None:
    page = Sample("Who?", (), pages(["a", "a", "a"], PARAGRAPHS))
    settings = [REUSE, Setting("document", BlendParams(mode="reuse"), "document")]
    results = evaluate(setup.engine, setup.store, [page], settings, EvaluateOptions(TOKENS))
    [sink], [document] = results.by_label["reuse"], results.by_label["document"]
    assert document.exact_tokens == document.cached_tokens
    assert max(document.kl) < 1e-8 < max(sink.kl)


def test_full_prefill_runs_once_a_sample_whatever_context_comes_first(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own context is only a name: the prompt's ids are the same in every context."""
    runs: list[str] = []

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*told: Any, **named: Any) -> Any:
            runs.append(name)
            return run(*told, **named)

        return counting

    monkeypatch.setattr("cacheblend_cli.evaluation.evaluate.run_full", counted("full", run_full))
    floor = replace(NOISE_FLOOR, prefill=counted("floor", prefill_in_pieces))
    settings = [Setting("document", BlendParams(mode="reuse"), "document"), REUSE, FULL, floor]
    results = evaluate(setup.engine, setup.store, SAMPLES[:2], settings, EvaluateOptions(TOKENS))
    assert sorted(runs) == ["floor", "floor", "full", "full"]
    assert results.measured == 8
    assert len(results.full) == len(results.by_label["noise floor"]) == 2


def test_a_left_context_that_is_not_in_the_prompt_is_used_all_the_same(setup: Setup) -> None:
    alone = Sample("Who?", (), (Context(PARAGRAPHS[1], "a", (PARAGRAPHS[0],)),))
    results = evaluate(
        setup.engine, setup.store, [alone], [REUSE, Setting("document", BlendParams(mode="reuse"), "document")]
    )
    assert max(results.by_label["reuse"][0].kl) < 1e-8  # one chunk, collected behind the prefix: exact
    assert results.by_label["document"][0].exact_tokens == 0
    assert max(results.by_label["document"][0].kl) > 1e-6


def test_a_run_resumes_from_its_file(setup: Setup, tmp_path: Path) -> None:
    path, settings = tmp_path / "records.jsonl", [REUSE, SOME]

    def interrupt(done: int, total: int, text: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with RecordFile(path) as records, pytest.raises(KeyboardInterrupt):
        evaluate(setup.engine, setup.store, SAMPLES, settings, EvaluateOptions(TOKENS, records), on_progress=interrupt)
    assert len(path.read_text().splitlines()) == 6
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # as a kill in the middle of a write leaves it
    with RecordFile(path) as records:
        assert len(records) == 5
        results = evaluate(setup.engine, setup.store, SAMPLES, settings, EvaluateOptions(TOKENS, records))
    assert (results.resumed, results.measured) == (5, 4)
    fresh = evaluate(setup.engine, setup.store, SAMPLES, settings, EvaluateOptions(TOKENS))
    for label, expected in fresh.by_label.items():
        found = results.by_label[label]
        assert [r.answer for r in found] == [r.answer for r in expected]
        assert [r.kl for r in found] == [pytest.approx(r.kl, abs=1e-9) for r in expected]
    with RecordFile(path) as records:
        renamed = [replace(REUSE, label="other name"), Setting("new", BlendParams(ratio=0.31))]
        again = evaluate(setup.engine, setup.store, SAMPLES, renamed, EvaluateOptions(TOKENS, records))
        assert (again.resumed, again.measured) == (6, 3)
        assert [r.label for r in again.by_label["other name"]] == ["other name"] * 3
        longer = evaluate(setup.engine, setup.store, SAMPLES[:1], [REUSE], EvaluateOptions(TOKENS + 1, records))
        assert longer.resumed == 0  # another answer length is another measurement


@pytest.mark.parametrize("text", ["my notes", "my notes\n", '{"question": "q"}\n', '{"key": "k"}\nnotes\n'])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"notes:\d+ "):
        RecordFile(path)
    assert path.read_text() == text


def test_chunks_are_removed_after_their_last_sample_when_asked(setup: Setup) -> None:
    sizes: list[int] = []
    settings = [REUSE, Setting("document", BlendParams(), "document")]
    evaluate(
        setup.engine, setup.store, SAMPLES, settings, EvaluateOptions(2, keep_chunks=False),
        on_progress=lambda done, total, text: sizes.append(len(list(setup.store.chunks()))),
    )  # fmt: skip
    assert sizes[0] == 0 < sizes[1]
    assert sizes[-1] == 0


def test_chunks_whose_kv_was_evicted_are_collected_again(setup: Setup) -> None:
    chunks = SampleChunks(setup.engine, setup.store)
    assert chunks.store(SAMPLES[:1], ["sink"]) == 3
    setup.store.evict_chunks(chunks.keys(SAMPLES[0], "sink")[:2])
    assert chunks.store(SAMPLES[:1], ["sink"]) == 2
    assert all(map(setup.store.has_kv, chunks.keys(SAMPLES[0], "sink")))


def test_a_sample_too_long_for_the_model_is_skipped(setup: Setup) -> None:
    long = Sample("Who?", (), (Context(" ".join(PARAGRAPHS * 20)),))
    results = evaluate(setup.engine, setup.store, [long, SAMPLES[0]], [REUSE], EvaluateOptions(TOKENS))
    assert [number for number, _ in results.skipped] == [1]
    assert len(results.full) == len(results.by_label["reuse"]) == 1


def test_a_wrong_setting_is_an_error_and_no_skipped_sample(setup: Setup) -> None:
    with pytest.raises(UsageError, match="check-layer 9"):
        evaluate(setup.engine, setup.store, SAMPLES, [Setting("x", BlendParams(selector="hkvd", check_layer=9))])
    with pytest.raises(UsageError, match="reuse"):
        evaluate(setup.engine, setup.store, SAMPLES, [REUSE, replace(SOME, label="reuse")])


def test_summaries_without_references_report_fidelity_alone(setup: Setup) -> None:
    bare = [replace(s, answers=()) for s in SAMPLES]
    full, reuse = summarise(evaluate(setup.engine, setup.store, bare, [REUSE], EvaluateOptions(TOKENS)))
    assert full.f1 is reuse.f1 is reuse.norm_f1 is None
    assert full.kl is None
    assert reuse.kl is not None
    assert reuse.kl.value > 0
    assert reuse.same_answer is not None


def test_summaries_pool_tokens(setup: Setup) -> None:
    results = evaluate(setup.engine, setup.store, SAMPLES, [REUSE, SOME], EvaluateOptions(TOKENS))
    _, reuse, some = summarise(results, resamples=50)
    records = results.by_label["some"]
    assert some.top1 is not None
    assert some.top1.value == sum(sum(r.top1) for r in records) / sum(len(r.top1) for r in records)
    assert 0.29 < some.recomputed < 0.35
    assert reuse.budget == 0.0 < some.budget


def test_relative_rmse() -> None:
    a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0]])
    assert relative_rmse([b, a * 1.1], [a, a]) == pytest.approx([1.0, 0.1])
    assert relative_rmse([b], [b]) == [0.0]
