"""--ratio auto: measurements, decisions, messages and stored speeds. What a full prefill is estimated to take."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bare_store import bare_writing
from cacheblend_store import ChunkStore

from cacheblend_cli.blend import speeds
from cacheblend_cli.engine.features.auto_ratio import full_ttft_s
from cacheblend_cli.types import Decision, Estimate

Cli = Callable[..., Any]
MEASURING = "measuring how fast this machine is"


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "PROBE_ROWS", speeds.PROBE_ROWS[:3])
    monkeypatch.setattr(speeds, "MOVED_ROWS", 256)


def ask(cli: Cli, stored: list[str], *flags: str) -> Any:
    result = cli("ask", "who leads billing?", "--chunks", ",".join(stored[:4]), "--max-tokens", "4", *flags)
    assert result.code == 0, result.err
    return result


def speed_file() -> Path:
    [path] = Path(os.environ["XDG_CACHE_HOME"], "cacheblend", "speeds").iterdir()
    return path


def set_speeds(**values: float) -> None:
    path = speed_file()
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_machine_is_measured_once_and_learns_from_every_ask(cli: Cli, stored: list[str]) -> None:
    first = ask(cli, stored, "--ratio", "auto", "--json")
    assert MEASURING in first.err
    record = first.records[0]
    auto = record["auto"]
    assert (auto["mode"], auto["floor"]) == (record["mode"], 0.15)
    assert auto["ratio"] == pytest.approx(record["ratio"], abs=1e-4)
    assert auto["ttft_s"] == record["timing"]["ttft_s"]
    for name in ("predicted_ttft_s", "predicted_full_ttft_s", "layer_recompute_s", "compute_s", "row_s"):
        assert auto[name] > 0
    before = json.loads(speed_file().read_text())
    assert before["prefills"] == 1
    again = ask(cli, stored, "--ratio", "auto", "--json")
    assert MEASURING not in again.err
    assert again.records[0]["auto"]["prefills_learnt_from"] == 1
    assert json.loads(speed_file().read_text())["prefills"] == 2


def test_slow_loading_is_a_full_prefill_and_fast_loading_the_floor(cli: Cli, stored: list[str]) -> None:
    full = ask(cli, stored, "--mode", "full", "--json", "--ids").records[0]
    ask(cli, stored, "--ratio", "auto")
    set_speeds(bytes_per_s=1.0)
    slow = ask(cli, stored, "--ratio", "auto", "--json", "--ids").records[0]
    assert (slow["mode"], slow["ratio"], slow["kv_bytes_loaded"]) == ("full", 1.0, 0)
    assert slow["generated_ids"] == full["generated_ids"]
    set_speeds(bytes_per_s=1e15, layer_s=0.0, row_s=1.0)
    fast = ask(cli, stored, "--ratio", "auto", "--json").records[0]
    assert (fast["mode"], fast["ratio"], fast["auto"]["floor"]) == ("blend", 0.15, 0.15)
    inexact = fast["cached_tokens"] - fast["exact_tokens"]
    assert 0.15 * inexact <= fast["recomputed_tokens"] < 0.15 * inexact + 1


def test_loading_is_learnt_again_after_some_full_prefills(cli: Cli, stored: list[str]) -> None:
    """A full prefill says nothing of loading: a bad first measure must not stand for ever."""
    ask(cli, stored, "--ratio", "auto")
    set_speeds(bytes_per_s=1.0, not_loaded=0)
    for i in range(1, 3):
        ask(cli, stored, "--ratio", "auto")
        assert json.loads(speed_file().read_text())["not_loaded"] == i
    set_speeds(not_loaded=16, layer_s=0.0, row_s=1.0)
    again = ask(cli, stored, "--ratio", "auto", "--json").records[0]
    assert (again["mode"], again["ratio"]) == ("blend", again["auto"]["floor"])
    learnt = json.loads(speed_file().read_text())
    assert learnt["bytes_per_s"] > 1000
    assert learnt["not_loaded"] == 0


def test_what_was_predicted_and_what_came_is_said(cli: Cli, stored: list[str]) -> None:
    result = ask(cli, stored, "--ratio", "auto", "--explain")
    assert "by --ratio auto" in result.err
    assert " predicted)" in result.err
    assert "auto: predicted first token" in result.err
    assert "auto: actual first token" in result.err
    assert "auto" not in result.out
    set_speeds(bytes_per_s=1.0)
    result = ask(cli, stored, "--ratio", "auto", "--explain")
    assert "full prefill" in result.err
    assert re.search(r"full prefill of \d+ tokens by --ratio auto", result.err)


def test_a_dry_run_decides_and_computes_nothing(cli: Cli, stored: list[str]) -> None:
    ask(cli, stored, "--ratio", "auto")
    set_speeds(bytes_per_s=1e15, layer_s=0.0, row_s=1.0)
    kept = speed_file().read_text()
    plan = ask(cli, stored, "--ratio", "auto", "--dry-run", "--json").records[0]
    assert (plan["auto"]["mode"], plan["auto"]["ratio"], plan["auto"]["ttft_s"]) == ("blend", 0.15, None)
    assert "--ratio auto: blend at ratio 0.15" in ask(cli, stored, "--ratio", "auto", "--dry-run").out
    assert speed_file().read_text() == kept
    assert ask(cli, stored, "--dry-run", "--json").records[0]["auto"] is None


def test_a_damaged_speed_file_is_measured_anew(cli: Cli, stored: list[str]) -> None:
    ask(cli, stored, "--ratio", "auto")
    speed_file().write_text('{"format": 1, "row_s": ')
    assert MEASURING in ask(cli, stored, "--ratio", "auto").err
    assert json.loads(speed_file().read_text())["row_s"] > 0


def test_a_damaged_chunk_is_computed_and_teaches_nothing(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    ask(cli, stored, "--ratio", "auto")
    set_speeds(bytes_per_s=1e15, layer_s=0.0, row_s=1.0)  # measured ones may make a full prefill the faster
    before = speed_file().read_text()
    with ChunkStore.open(tmp_path / "store", mode="write") as store, bare_writing(store) as (txn, dbs):
        name = bytes.fromhex(stored[1]) + (1).to_bytes(4, "big")
        blob = bytearray(txn.get(name, db=dbs["blobs"]))
        blob[-7] ^= 1
        txn.put(name, bytes(blob), db=dbs["blobs"])
    damaged = ask(cli, stored, "--ratio", "auto", "--selector", "first", "--json")
    assert damaged.records[0]["auto"]["mode"] == "blend"
    assert "does not match its digest" in damaged.err
    assert damaged.records[0]["chunks"][1]["status"] == "computed"
    assert speed_file().read_text() == before


def test_a_full_prefill_by_estimate_stores_nothing_and_holes_are_stored(cli: Cli, stored: list[str]) -> None:
    ask(cli, stored, "--ratio", "auto")
    before = cli("chunks", "ls", "--json").records
    set_speeds(bytes_per_s=1.0)
    result = ask(cli, stored, "--ratio", "auto")
    assert "stored the KV" not in result.err
    assert cli("chunks", "ls", "--json").records == before


def test_ratio_auto_is_a_setting_and_applies_to_blending_only(
    cli: Cli, stored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHEBLEND_RATIO", "auto")
    assert "auto" in ask(cli, stored, "--json").records[0]
    for mode in ("full", "reuse"):
        assert "auto" not in ask(cli, stored, "--mode", mode, "--json").records[0]
    assert "auto" not in ask(cli, stored, "--ratio", "0.3", "--json").records[0]
    bad = cli("ask", "who?", "--ratio", "often")
    assert (bad.code, bad.out) == (2, "")
    assert "--ratio" in bad.err


def test_eval_measures_it_beside_fixed_ratios(cli: Cli, tmp_path: Path) -> None:
    rows = [
        {"question": "who?", "ctxs": [{"text": "the lead of billing is Mara"}, {"text": "she works in Bergen"}]},
        {"question": "where?", "ctxs": [{"text": "near the harbor"}, {"text": "a parrot"}, {"text": "at home"}]},
    ]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    flags = ("--mode", "blend", "--ratio", "auto", "--ratio", "0.5", "--max-tokens", "4", "--json", "--no-noise-floor")
    result = cli("eval", "data.json", *flags)
    assert result.code == 0, result.err
    assert [r["label"] for r in result.records] == ["full prefill", "query auto", "query 0.5"]
    assert "ms predicted" in result.err
    assert [r["setting"]["auto"] for r in result.records] == [False, True, False]
    set_speeds(bytes_per_s=1e15, layer_s=0.0, row_s=1.0)
    fast = cli("eval", "data.json", *flags, "--plot", "p.svg")
    assert 0.15 <= fast.records[1]["ratio"] < 0.6  # whole tokens of few
    assert "query auto" in (tmp_path / "p.svg").read_text()
    assert "ratio 0.15 to 0.15, median 0.15" in fast.err
    set_speeds(bytes_per_s=1.0)
    slow = cli("eval", "data.json", *flags)
    assert "full prefill for 2 of 2 questions" in slow.err
    assert slow.records[1]["same_answer"]["value"] == 1
    assert slow.records[1]["budget"] == slow.records[1]["ratio"] == 1


def test_a_verbose_answer_says_what_a_full_prefill_takes(cli: Cli, stored: list[str]) -> None:
    first = ask(cli, stored, "-v")
    assert first.err.count(MEASURING) == 1
    set_speeds(layer_s=0.0, row_s=1.0, pair_s=0.0, bytes_per_s=1e15)  # a second for each row and layer
    plain, verbose = (ask(cli, stored, "--json", *flags) for flags in ((), ("-v",)))
    assert MEASURING not in verbose.err
    timing, record = plain.records[0]["timing"], verbose.records[0]
    assert timing["full_ttft_s"] is None
    rows = record["prompt_tokens"]
    assert record["timing"]["full_ttft_s"] > rows  # of the first layer alone
    assert "auto" not in record
    assert ask(cli, stored, "--json", "-v", "--mode", "full").records[0]["timing"]["full_ttft_s"] is None
    assert "a full prefill takes about " in ask(cli, stored, "-v").err
    assert "a full prefill takes about " not in ask(cli, stored).err


def test_an_estimate_changes_no_answer_and_learns(cli: Cli, stored: list[str]) -> None:
    ask(cli, stored, "-v")
    before = json.loads(speed_file().read_text())["prefills"]
    plain, verbose = (ask(cli, stored, "--json", "--ids", *flags).records[0] for flags in ((), ("-v",)))
    for name in ("mode", "ratio", "recomputed_tokens", "generated_ids"):
        assert verbose[name] == plain[name], name
    assert json.loads(speed_file().read_text())["prefills"] == before + 1


def test_what_comes_before_the_prefill_is_in_both_times() -> None:
    def decision(chosen_s: float, full_s: float) -> Decision:
        chosen, full = (Estimate(s, s, 0.0, 0.0) for s in (chosen_s, full_s))
        return Decision("blend", 0.15, 0.15, 0.0, 0.0, chosen, full)

    assert full_ttft_s(decision(1.0, 4.0), 1.5) == 4.5
    assert full_ttft_s(decision(1.0, 0.8), 1.5) == pytest.approx(1.3)  # blending is the slower one
    assert full_ttft_s(decision(2.0, 4.0), 0.5) == 4.0  # this prefill was faster than predicted


def test_with_ratio_auto_it_is_said_too(cli: Cli, stored: list[str]) -> None:
    ask(cli, stored, "--ratio", "auto")
    set_speeds(layer_s=0.0, row_s=1.0, bytes_per_s=1e15)
    record = ask(cli, stored, "--ratio", "auto", "--json").records[0]
    assert record["mode"] == "blend"
    assert record["timing"]["full_ttft_s"] >= record["auto"]["predicted_full_ttft_s"] - 1
