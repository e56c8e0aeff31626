"""cacheblend bench: its report, its prompts, and refused settings. No time is asserted."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.worker.memory import reserve
from cacheblend_cli.evaluation.bench import bench, layout_of
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.evaluation.speed import ceiling, in_turn, ordinary_ids
from cacheblend_cli.prompt.plan import ChunkInput, plan_prompt
from cacheblend_cli.types import BlendParams

Cli = Callable[..., Any]

SMALL = ("--tokens", "99", "--chunks", "4", "--question-tokens", "6", "--rounds", "2", "--decode-tokens", "3")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder, empty."""
    path = tmp_path / "temporary"
    path.mkdir()
    path.chmod(0o777)  # some systems have it so
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_one_object_with_every_setting(cli: Cli, temporary: Path) -> None:
    result = cli("bench", "--json", *SMALL)
    assert result.code == 0, result.err
    [report] = result.records
    assert report["chunk_tokens"] == [25, 25, 25, 24]
    assert report["prompt_tokens"] == report["prefix_tokens"] + 99 + report["suffix_tokens"]
    assert report["suffix_tokens"] > report["question_tokens"] == 6
    assert (report["rounds"], report["decode_tokens"], report["device"], report["kv_dtype"]) == (2, 3, "cpu", "float32")
    for name in ("threads", "layers", "collect_s", "full_prefill_s", "decode_tokens_per_s"):
        assert report[name] > 0, name
    assert report["notes"] == []
    full, *others = report["settings"]
    assert [s["setting"] for s in others] == ["reuse", "query 0.15", "hkvd 0.15"]
    assert (full["mode"], full["speedup"], full["ceiling"], full["kv_bytes_loaded"]) == ("full", 1, 1, 0)
    assert full["load_bytes_per_s"] is None
    for s in others:
        assert len(s["all_ttft_s"]) == 2
        assert min(s["all_ttft_s"]) <= s["ttft_s"] <= max(s["all_ttft_s"])
        assert s["speedup"] == pytest.approx(report["full_prefill_s"] / s["ttft_s"])
        assert s["measured_over_ceiling"] == pytest.approx(s["speedup"] / s["ceiling"])
        assert s["load_bytes_per_s"] == pytest.approx(s["kv_bytes_loaded"] / s["kv_load_s"])
        # K and V of prefix and chunks: 4 layers, 2 heads of 16, fp32
        assert s["kv_bytes_loaded"] == (report["prefix_tokens"] + 99) * 2 * 4 * 2 * 16 * 4
        assert s["kv_load_stall_s"] >= 0
    assert others[0]["ceiling"] > others[1]["ceiling"] > others[2]["ceiling"] > 1
    assert list(temporary.iterdir()) == []


def test_the_table_is_plain_text_in_a_pipe(cli: Cli) -> None:
    result = cli("bench", *SMALL, "--selector", "first", "--selector", "none", "--ratio", "0.1", "--ratio", "1")
    assert result.code == 0, result.err
    head, *rows, blank, decode = result.out.splitlines()
    assert head.split("  ")[0] == "setting"
    assert "measured/ceiling" in head
    assert [row[:12].strip() for row in rows] == ["full prefill", "reuse", "first 0.1", "first 1", "none"]
    assert all(len(row) <= len(head) and row.endswith(" ms") for row in rows)
    assert blank == ""
    assert decode.startswith("decode: ")
    assert decode.endswith(" tokens/s over 3 tokens")
    assert "\x1b" not in result.out
    assert "4 chunks of 24 or 25" in result.err


def test_settings_of_ask_apply(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RATIO", "0.4"), ("SELECTOR", "random"), ("MODE", "full")):
        monkeypatch.setenv(f"CACHEBLEND_{name}", value)
    [report] = cli("bench", "--json", *SMALL).records
    assert [(s["setting"], s["ratio"]) for s in report["settings"][2:]] == [("random 0.4", 0.4), ("hkvd 0.4", 0.4)]


def test_stored_as_the_kv_dtype_says(cli: Cli) -> None:
    plain, small = (cli("bench", "--json", *SMALL, "--kv-dtype", d).records[0] for d in ("exact", "float8_e4m3"))
    assert small["kv_dtype"] == "float8_e4m3"
    # the prefix is in the compute dtype whatever the codec; of a chunk's token, 4 layers of 2 heads of 16, K and V;
    # and of each of 4 chunks, K and V a scale per layer and head, in 4 bytes
    bytes_saved = plain["settings"][1]["kv_bytes_loaded"] - small["settings"][1]["kv_bytes_loaded"]
    assert bytes_saved == 99 * 2 * 4 * 2 * 16 * (4 - 1) - 4 * 4 * 2 * 4 * 2


def test_the_default_prompt_fits_the_model(cli: Cli) -> None:
    """The context of the model here is 1024: fewer than the 2048 tokens a larger one is measured with."""
    [report] = cli("bench", "--json", "--rounds", "1", "--decode-tokens", "2").records
    assert len(set(report["chunk_tokens"])) == 1
    assert 1024 - 8 < report["prompt_tokens"] + 2 <= 1024


def test_the_largest_prompt_named_is_one_that_fits(cli: Cli) -> None:
    result = cli("bench", "--tokens", "5000")
    assert result.code == 2
    assert "1024" in result.err
    fits = result.err.split("--tokens ")[1].split()[0]
    short = ("--rounds", "1", "--selector", "none", "--json")
    assert cli("bench", "--tokens", str(int(fits) + 1), *short).code == 2
    assert cli("bench", "--tokens", fits, *short).records[0]["prompt_tokens"] + 32 == 1024


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--question-tokens", "2000"), 2, "--question-tokens"),
        (("--tokens", "4", "--chunks", "8"), 2, "--chunks"),
        (("--chunks", "1020"), 2, "--chunks"),
        (("--selector", "best"), 2, "known: hkvd"),
        (("--selector", "4+query"), 2, "name:count"),
        (("--ratio", "1.5"), 2, "1.5"),
        (("--ratio", "nan"), 2, "nan"),
        (("--rounds", "0"), 2, "--rounds: runs of each setting"),
        (("--decode-tokens", "1"), 2, "--decode-tokens: tokens to decode"),
        (("--kv-dtype", "int2"), 2, "known: auto"),
        (("--model", "./nowhere"), 3, "nowhere"),
        (("--device", "cuda:99"), 5, "cuda"),
    ],
)
def test_refused_with_a_reason(cli: Cli, temporary: Path, arguments: tuple[str, ...], code: int, told: str) -> None:
    result = cli("bench", *arguments)
    assert result.code == code, result.err
    assert told in result.err.lower()
    assert "traceback" not in result.err.lower()
    assert result.out == ""
    assert list(temporary.iterdir()) == []


def test_no_space_is_said_before_anything_is_computed(
    cli: Cli, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage
    small = SimpleNamespace(total=1 << 30, used=1 << 30, free=1 << 20)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: small if str(path).startswith(str(temporary)) else real(path)
    )
    result = cli("bench", *SMALL)
    assert result.code == 4
    assert "1 MiB" in result.err
    assert "TMPDIR" in result.err
    assert "--store" not in result.err
    assert list(temporary.iterdir()) == []


def test_random_ids_are_those_of_text(model: Path) -> None:
    engine = Engine.load(EngineConfig(str(model), device="cpu"))
    special = engine.model.tokenizer.added_ids | engine.model.eos_ids
    assert special
    ordinary = ordinary_ids(engine.model).tolist()
    assert special.isdisjoint(ordinary)
    assert len(ordinary) + len(special) >= engine.model.tokenizer.vocab_size
    layout = layout_of(engine, 600, 3, 40, 1)
    assert [len(ids) for ids in layout.chunks] == [200, 200, 200]
    assert len(set(layout.chunks)) == 3
    assert {i for ids in layout.chunks for i in ids} <= set(ordinary)
    assert layout == layout_of(engine, 600, 3, 40, 1)


def test_a_lasting_pool_gets_its_blocks_back(model: Path) -> None:
    """As on a GPU, where one pool of a fixed size serves every run of every round."""
    engine = Engine.load(EngineConfig(str(model), device="cpu"))
    meter = SimpleNamespace(total=64 << 20, used=lambda: 0, peak=lambda run: 1 << 20)
    memory = reserve(engine.model.decoder, engine.config, meter=meter)
    engine.runtime._memory = memory
    free, layout = memory.num_tokens, layout_of(engine, 600, 3, 8, 4)
    settings = [Setting(mode, BlendParams(mode=mode)) for mode in ("full", "reuse", "blend")]
    assert free < 600 * 4 * 5  # without that, the runs would not fit
    report = bench(engine, settings, layout, rounds=4, decode_tokens=4, on_run=lambda *told: None)
    assert [s.setting for s in report.settings] == ["full", "reuse", "blend"]
    assert memory.num_tokens == free
    memory.pool.allocator.check_integrity()


def test_the_ceiling_counts_rows() -> None:
    """A prefix of 4, chunks of 10, 20 and 30 (the first one exact) and a suffix of 6, through 5 layers."""
    chunks = [ChunkInput(bytes([n]), "", (0,) * n) for n in (10, 20, 30)]
    plan = plan_prompt((0,) * 4, chunks, (0,) * 6, prefix_key=b"p")
    full = plan_prompt((0,) * 4, chunks, (0,) * 6, prefix_key=b"p", reuse=False)
    assert ceiling(full, 5, BlendParams(mode="full")) == 1
    assert ceiling(plan, 5, BlendParams(mode="reuse")) == 70 / 6
    assert ceiling(plan, 5, BlendParams(selector="all")) == 70 / 56
    assert ceiling(plan, 5, BlendParams(selector="query", ratio=0.1)) == pytest.approx(70 / 11)
    assert ceiling(plan, 5, BlendParams(selector="hkvd", ratio=0.1)) == pytest.approx(5 * 70 / (56 + 4 * 11))
    late = BlendParams(selector="hkvd", ratio=0.1, check_layer=3)
    assert ceiling(plan, 5, late) == pytest.approx(5 * 70 / (3 * 56 + 2 * 11))
    gradual = BlendParams(selector="hkvd", checks=((1, 0.4), (3, 0.1)))
    assert ceiling(plan, 5, gradual) == pytest.approx(5 * 70 / (56 + 2 * 26 + 2 * 11))


def test_cases_run_in_turn_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    cases = {name: lambda name=name: (calls.append(name), len(calls))[1] for name in "ab"}
    told: list[tuple[int, int, str]] = []
    found = in_turn(cases, 2, lambda *run: told.append(run))
    assert calls == list("ababab")
    assert found == {"a": [3, 5], "b": [4, 6]}
    assert told == [(i, 6, name) for i, name in enumerate("ababab")]
