"""The fidelity study: its sets contain what their questions ask for, a run resumes, and its tables are what was
measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cacheblend_store import ChunkStore
from checkpoints import write_checkpoint
from study_modules import STUDY, study_modules

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.evaluate import FULL, Results
from cacheblend_cli.evaluation.records import Record
from cacheblend_cli.evaluation.samples import Sample, pages
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.types import AskRequest, BlendParams

MODULES = ("run", "results", "report", "questions", "sets", "settings", "kv_codecs")


@pytest.fixture(scope="module")
def study() -> Iterator[dict[str, ModuleType]]:
    """Its modules by name."""
    with study_modules(register=True) as load, pytest.MonkeyPatch.context() as patch:
        modules = {name: load(name) for name in MODULES}
        patch.setattr(modules["questions"], "NEEDLE_SETS", 16)
        yield modules


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of questions, each over ten passages of sentences of their own."""
    said = [
        {
            "question": f"question {number}?",
            "answers": ["yes"],
            "ctxs": [
                {"title": "", "text": " ".join(f"passage {number} {c} says the thing {s} here." for s in range(8))}
                for c in range(10)
            ],
        }
        for number in range(5)
    ]
    folder = tmp_path / "data"
    (folder / "rag").mkdir(parents=True)
    (folder / "musique_dev.json").write_text(json.dumps(said))
    (folder / "rag/1.json").write_text(json.dumps({"0": "a text", "1": "another", "chunk_num": 2, "query": "what?"}))
    return folder


def test_every_set_is_the_same_each_time(study: dict[str, ModuleType], data: Path) -> None:
    sets = study["sets"].study_sets()
    made = {name: one.samples(data) for name, one in sets.items()}
    assert {name: one.samples(data) for name, one in sets.items()} == made
    assert [len(made["musique"][0].contexts), len(made["musique-10"][0].contexts), len(made["rag"])] == [4, 10, 1]
    for name, chunks in (("needles-2k", 4), ("tracking-2k", 4), ("needles-7k", 13)):
        assert {len(sample.contexts) for sample in made[name]} == {chunks}


def test_a_question_is_in_one_half_alone(study: dict[str, ModuleType], data: Path) -> None:
    samples = study["sets"].study_sets()["musique"].samples(data)
    fit, test = ({s.question for s in samples[start::2]} for start in (0, 1))
    assert not fit & test
    assert len({(s.question, s.contexts) for s in samples}) == len(samples)


@pytest.mark.parametrize("name", ["needles-2k", "needles-7k"])
def test_the_code_asked_for_is_said_once_and_not_in_the_first_chunk(
    study: dict[str, ModuleType], data: Path, name: str
) -> None:
    for sample in study["sets"].study_sets()[name].samples(data):
        thing = sample.question.split(" the ")[2].split("?")[0]
        said = f"The access code of the {thing} is {sample.answers[0]}."
        assert [c.text.count(said) for c in sample.contexts].count(1) == 1
        assert said not in sample.contexts[0].text
        assert sum(c.text.count("The access code of") for c in sample.contexts) == 2 * len(sample.contexts)


def test_the_value_asked_for_is_reached_over_three_chunks(study: dict[str, ModuleType], data: Path) -> None:
    for sample in study["sets"].study_sets()["tracking-2k"].samples(data):
        asked, links = sample.question.split()[3], 0
        while True:
            [told] = [c.text for c in sample.contexts if f"{asked} has the " in c.text]
            after = told.split(f"{asked} has the ")[1]
            if after.startswith("value "):
                break
            asked, links = after.removeprefix("same value as ").split(".")[0], links + 1
        assert links == 2
        assert after.removeprefix("value ").split(".")[0] == sample.answers[0]


def test_pages_are_paragraphs_that_tile_their_passage(study: dict[str, ModuleType], data: Path) -> None:
    sets = study["sets"].study_sets()
    for sample, whole in zip(sets["pages"].samples(data), sets["musique-10"].samples(data), strict=True):
        for page in range(2):
            paragraphs = sample.contexts[4 * page : 4 * page + 4]
            assert [len(c.before) for c in paragraphs] == [0, 1, 2, 3]
            assert "".join(c.text for c in paragraphs) == whole.contexts[page].text + "\n\n"


def test_a_pair_is_the_default_prompt_with_a_second_exact_chunk(
    study: dict[str, ModuleType], data: Path, model: Path, tmp_path: Path
) -> None:
    engine = Engine.load(EngineConfig(model=str(model), device="cpu", dtype="float32", block_size=16))
    sample, plans = study["questions"].pairs(data, words=8)[0], {}
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        chunks = SampleChunks(engine, store, [sample])
        for context in ("sink", "document"):
            chunks.store([sample], [context])
            plans[context] = engine.resolve(store, AskRequest(sample.question, chunks.keys(sample, context))).plan
    assert [c.status for c in plans["sink"].chunks] == ["exact", *["blended"] * 3]
    assert [c.status for c in plans["document"].chunks] == [*["exact"] * 2, *["blended"] * 2]
    assert plans["document"].token_ids == plans["sink"].token_ids


def test_layouts_keep_the_context_in_which_chunks_were_collected(
    study: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ("the lead of billing is Mara ", "she works in Bergen ", "she keeps a parrot ", "Jonas leads ", "at home ")
    samples = [Sample("who?", ("Mara",), pages(["a", "a", "a", "b", "b"], texts), {"across": a}) for a in (True, False)]
    monkeypatch.setattr(study["questions"], "spellable_samples", lambda: samples)
    whole, shuffled, headless = study["questions"].layouts().values()
    assert whole == samples
    assert all({*s.contexts} == {*t.contexts} for s, t in zip(whole, shuffled, strict=True))
    assert any(s.contexts != t.contexts for s, t in zip(whole, shuffled, strict=True))
    [without] = headless  # the other question's answer is in what is left out
    assert [c.text.strip() for c in without.contexts] == ["she works in Bergen", "she keeps a parrot", "at home"]
    assert without.contexts[1].before == whole[0].contexts[2].before


def run(study: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, *flags: object) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", *map(str, flags)])
    study["run"].main()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", "llama-gqa", max_position_embeddings=4096)
    return tmp_path / "model"


def test_a_run_goes_on_from_its_records_and_fills_its_page(
    study: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, data: Path, model: Path, tmp_path: Path
) -> None:
    out, records = tmp_path / "out", tmp_path / "records"
    flags = ("--data", data, "--set", "musique", "--main", "--model", model, "--records", records, "--out", out)
    flags += ("--ratio", 0.5, "--ratio", 0.3)
    for number in (1, 2):  # each ends with the question that is measured when its time is over
        run(study, monkeypatch, *flags, "--seconds", 0)
        result = json.loads((out / "musique.json").read_text())
        assert result["questions"] == number
    first = (records / study["results"].CORRECTION / "musique.jsonl").read_text()
    run(study, monkeypatch, *flags, "--questions", 2)  # measures nothing
    assert (records / study["results"].CORRECTION / "musique.jsonl").read_text() == first
    assert json.loads((out / "musique.json").read_text()) == result
    rows = {row["label"]: row for row in result["rows"]}
    assert result["questions"] == 2
    assert len(rows) == 21
    assert rows["query, regression 0.5"]["ratio"] == 0.5
    default, reuse = rows["query, regression 0.15"], rows["reuse"]
    assert "less_default" not in default
    assert reuse["less_default"][1] <= reuse["less_default"][0] <= reuse["less_default"][2]
    assert reuse["kl"][1] <= reuse["kl"][0] <= reuse["kl"][2]
    assert 0 < reuse["kl_median"] <= reuse["kl_p90"]
    page = (out / "report.md").read_text()
    assert page.count("| query, regression |") == 2  # at .15, and over all ratios
    assert f"| CacheBlend | 0.15 | {rows['CacheBlend 0.15']['work']:.1%} |" in page


def test_partial_runs_stay_out_of_the_committed_results(
    study: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study["run"], "run", lambda *told: pytest.fail("measured"))
    for flags in (
        ("--questions", 1),
        ("--half", "fit"),
        ("--dtype", "bfloat16"),
        ("--quick",),
        ("--main",),
        ("--ratio", 0.5),
    ):
        with pytest.raises(SystemExit) as ended:
            run(study, monkeypatch, *flags)
        assert ended.value.code == 2
        assert "--out" in capsys.readouterr().err


def test_the_committed_pages_are_of_the_committed_results(study: dict[str, ModuleType]) -> None:
    found = study["report"].read_results(STUDY / "results")
    pages = "".join(path.read_text() for path in study["report"].PAGES)
    blocks = study["report"].blocks_of(found)
    assert len(blocks) > 15
    for name, block in blocks.items():
        assert f"<!-- {name} -->\n\n{block}\n\n<!-- end -->" in pages


@pytest.mark.parametrize("blended", [False, True])
def test_fewer_bits_cost_more_and_a_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    study: dict[str, ModuleType],
    data: Path,
    model: Path,
    tmp_path: Path,
    blended: bool,
) -> None:
    codecs, out, records = study["kv_codecs"], tmp_path / "codecs.json", tmp_path / "records.jsonl"
    flags = ["--data", str(data), "--model", str(model), "--records", str(records), "--out", str(out)]
    for questions, lines in ((1, None), (2, None), (2, 0)):
        before = records.read_text() if records.exists() else ""
        monkeypatch.setattr(
            "sys.argv", ["kv_codecs.py", *flags, "--questions", str(questions), *["--blended"] * blended]
        )
        codecs.main()
        added = len(records.read_text().removeprefix(before).splitlines())
        assert added == (len(codecs.CODECS) + 2 * blended if lines is None else 0)
    rows = {row["codec"]: row for row in json.loads(out.read_text())["model"]}
    assert {row["questions"] for row in rows.values()} == {2}
    most, fewest = codecs.CODECS[0], codecs.CODECS[-1]
    assert rows[most]["kl"][0] < rows[fewest]["kl"][0] or blended
    if blended:
        assert rows["exact"]["kl"][0] < rows["reuse exact"]["kl"][0]
        assert abs(rows[most]["minus_exact"][0]) < rows["exact"]["kl"][0]


def test_the_first_token_of_every_setting_is_timed(study: dict[str, ModuleType], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "qwen3", seed=3)
    engine = Engine.load(EngineConfig(model=str(tmp_path / "model"), device="cpu", dtype="float32", block_size=16))
    sample = Sample("Who?", ("Mara",), pages(["a", "a"], ["Mara leads billing.\n\n", "She works in Bergen.\n\n"]), {})
    settings = [
        Setting("reuse", BlendParams(mode="reuse")),
        Setting("query 0.5", BlendParams(selector="query", ratio=0.5), "document"),
    ]
    found: dict[str, Any] = study["results"].first_tokens(engine, sample, settings, float("inf"), rounds=2)
    assert list(found["shares"]) == ["reuse", "query 0.5"]
    assert min(found["full_s"], *found["shares"].values()) > 0
    assert found["rounds"] == 2
    assert study["results"].first_tokens(engine, sample, settings, 0.0, rounds=9)["rounds"] == 1


def test_answers_are_compared_over_questions_that_full_prefill_answers(study: dict[str, ModuleType]) -> None:
    def record(label: str, answer: str, f1: float) -> Record:
        return Record("", label, "", answer, 1, 1, 1, 1, 1.0, 1.0, 1.0, f1=f1)

    samples = [Sample("who?", ("Mara",), ()) for _ in range(3)]
    full = [record("full prefill", *of) for of in (("Maras", 0.0), ("the one", 0.0), ("she is called Mar", 0.2))]
    reuse = [record("reuse", str(number), 0.0) for number in range(3)]
    results = Results([FULL, study["settings"].reuse()], {"full prefill": full, "reuse": reuse})
    found, left = study["run"].answerable(results, samples)
    assert [r.answer for r in found.by_label["reuse"]] == ["0", "2"]
    assert left == [samples[0], samples[2]]


def test_the_office_is_asked_over_all_of_its_pages_in_several_orders(study: dict[str, ModuleType]) -> None:
    samples = study["questions"].office(2)
    half = len(samples) // 2
    assert all(any(s.answers[0] in c.text for c in s.contexts) for s in samples)
    assert [s.question for s in samples[:half]] == [s.question for s in samples[half:]]
    assert len({s.contexts for s in samples}) == len(samples)
    assert len({frozenset(s.contexts) for s in samples}) == 1
