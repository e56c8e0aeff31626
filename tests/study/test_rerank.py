"""The study of reranking: what is read from stored KV is a full prefill's, and orders are scored as they are said to
be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint
from study_modules import study_modules

from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.types import AskRequest, BlendParams

QUESTION = "who leads billing?"


@pytest.fixture
def study() -> Iterator[tuple[ModuleType, ModuleType]]:
    with study_modules() as load:
        yield load("rerank"), load("rerank_scores")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rerank") / "model"
    write_checkpoint(path, "qwen2", max_position_embeddings=8192, num_hidden_layers=4)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    def passage(number: int) -> str:
        return (
            ". ".join(" ".join(WORDS[(number + w + s) % len(WORDS)] for w in range(7)) for s in range(6))
            + f". {number}."
        )

    items = [
        {
            "question": f"{WORDS[n]} of {WORDS[n + 1]}?",
            "answers": [f"{10 * n + 1}."],
            "ctxs": [{"title": "", "text": passage(10 * n + p)} for p in range(2)],
        }
        for n in range(6)
    ]
    (tmp_path / "musique_dev.json").write_text(json.dumps(items))
    return tmp_path


def test_what_is_read_from_stored_kv_is_a_full_prefills(
    study: tuple[ModuleType, ModuleType], model: Path, tmp_path: Path
) -> None:
    rerank, _ = study
    texts = ["alpha beta gamma.\n\n", "Who leads? Mara leads billing.\n\n", "delta\n\n"]
    with (
        Engine.load(str(model), dtype="float32", kv_dtype="float32") as engine,
        ChunkStore.open(tmp_path / "store", mode="write") as store,
    ):
        reader = rerank.Reader(engine, store)
        reader.store(texts)
        found = reader.likelihoods(QUESTION, texts)
        for name, (before, own) in reader.forms(QUESTION).items():
            for text, likelihood in zip(texts, found[name], strict=True):
                wanted = full_logits(engine, store, reader.keys([text]), (*before, *own), len(own) + 1)[:-1]
                chosen = wanted.log_softmax(-1).gather(-1, torch.tensor(own)[:, None])
                assert float(likelihood) == pytest.approx(float(chosen.mean()), abs=1e-4)
        alone = reader.attention(QUESTION, [[text] for text in texts])
        together = reader.attention(QUESTION, [texts])
        assert alone.shape == (3, 4, 4, 2, 1)  # prompts, layers, heads, kinds, chunks
        assert together.shape == (1, 4, 4, 2, 3)
        assert float(together.sum(-1).max()) <= 1 + 1e-5
        [last] = reader.attention(QUESTION, [texts[2:]])
        torch.testing.assert_close(last, alone[2], msg="one prompt does not depend on the others of its launch")
        assert reader.fitting(QUESTION, texts * 1000) == (texts * 1000)[: len(reader.fitting(QUESTION, texts * 1000))]
        assert 3 < len(reader.fitting(QUESTION, texts * 1000)) < 3000


def full_logits(engine: Engine, store: ChunkStore, keys: list[bytes], suffix: tuple[int, ...], count: int) -> Any:
    request = engine.resolve(store, AskRequest(QUESTION, keys, BlendParams(mode="full")), suffix_ids=suffix)
    num_tokens = request.plan.num_tokens
    done = prefill(engine.runtime, request, output_positions=lambda plan: torch.arange(num_tokens - count, num_tokens))
    done.sequence.release()
    return done.result.logits


def test_records_resume_and_become_figures(
    study: tuple[ModuleType, ModuleType], model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wordllama", reason="needs the weights of wordllama")
    rerank, _ = study
    kept, out = tmp_path / "records", tmp_path / "rerank.json"
    of_sets = [x for name in ("musique", "office", "office-others") for x in ("--set", name)]

    def run(*flags: str) -> None:
        given = ["--data", data, "--records", kept, "--questions", "4", "--out", out, *flags]
        monkeypatch.setattr("sys.argv", ["rerank.py", *map(str, given)])
        rerank.main()

    run("--model", str(model), *of_sets)
    first = {path: path.stat().st_mtime_ns for path in kept.rglob("*.safetensors")}
    assert len(first) == 12
    run("--model", str(model), *of_sets)
    assert {path: path.stat().st_mtime_ns for path in kept.rglob("*.safetensors")} == first
    run("--report")
    results = json.loads(out.read_text())
    ranking = {(row["questions"], row["method"]): row for row in results["ranking"]}
    assert {name for name, _ in ranking} == {"musique", "office"}
    assert ranking["office", "search"]["at_5"] == 1
    assert "difference_1" not in ranking["office", "search"]
    assert ranking["office", "yes or no"]["difference_1"][0] == pytest.approx(
        ranking["office", "yes or no"]["at_1"] - ranking["office", "search"]["at_1"], abs=1e-3
    )
    assert next(row["score"] for row in results["weak"]) == "search"
    run("--model", str(model), "--answers", "--set", "office")
    answers = json.loads(out.read_text())["answers"]
    assert next(row["order"] for row in answers) == "search"
    assert len(answers) == 2
    assert all(0 <= row["right_full"] <= 4 for row in answers)
    run("--model", str(model), "--time")
    [times] = json.loads(out.read_text())["times"]
    assert times["questions"] == 4
    assert all(times[name] > 0 for name in ("search", "line: load", "line: compute", "together", "blend of five"))


def found(right: int, told: int, count: int = 4, heads: int = 6) -> dict[str, Any]:
    """A question whose search has hit 0 first. right: the hit that answers; told: the only head that looks at it."""
    asked = torch.zeros(count, 1, heads, 2)
    asked[right, 0, told, 1] = 1
    return {
        "match": torch.linspace(1, 0.7, count),
        "right": torch.arange(count) == right,
        "line": torch.where(torch.arange(count) == right, 0.0, -1.0),
        "turn": torch.where(torch.arange(count) == right, -1.0, 0.0),
        "yes": torch.zeros(count),
        **{f"{where}_asked": asked for where in ("alone", "together")},
        **{f"{where}_empty": torch.zeros_like(asked) for where in ("alone", "together")},
    }


def test_orders_are_scored(study: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    _, scores = study
    monkeypatch.setattr(scores, "HEADS", 1)
    asked = [found(place % 4, told=3) for place in range(12)]
    rows = {row["method"]: row for row in scores.rows_of({"musique": asked})}
    assert rows["search"]["at_1"] == 0.25
    assert rows["likelihood, in the message"]["at_1"] == 1
    assert rows["likelihood, in the message"]["difference_1"][0] == 0.75
    assert rows["likelihood, as a reply"]["at_1"] == 0
    assert rows["search + likelihood, as a reply"]["at_1"] == 0.25, "the weight beside the search's score may be none"
    assert rows["search + yes or no"]["at_1"] == 0.25
    assert rows["1 heads, together"]["at_1"] == 1
    assert rows["attention, together"]["at_1"] == 0.25, "the mean of all rows sees nothing of the last one"
    best = scores.best_method([*rows.values()])
    assert rows[best]["at_1"] == 1


def test_a_half_is_scored_by_what_was_chosen_on_the_other(
    study: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, scores = study
    monkeypatch.setattr(scores, "HEADS", 1)
    asked = [found(3, told=3 if place % 2 else 1) for place in range(12)]
    rows = scores.rows_of({"musique": asked, "office": [found(3, 1)]})
    [alone] = [row for row in rows if (row["questions"], row["method"]) == ("musique", "1 heads, each alone")]
    assert alone["at_1"] == 0, "each half's head says nothing on the other"


def test_questions_about_other_documents_are_told_apart(study: tuple[ModuleType, ModuleType]) -> None:
    _, scores = study
    own, others = [found(0, 0) for _ in range(3)], [found(0, 0) for _ in range(4)]
    others[0]["match"] = own[0]["match"] + 1
    for record in others:
        record["line"] = record["line"] - 5
    told = {row["score"]: row["told_apart"] for row in scores.weak_rows(own, others)}
    assert told["search"] == pytest.approx(3 / 4 / 2)
    assert told["likelihood, in the message"] == 1
    assert told["yes or no"] == 0.5
