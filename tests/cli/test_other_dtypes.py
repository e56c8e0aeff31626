"""A store made in one compute dtype, asked in another: its KV is converted, said once, and never passed on as the
other's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_kernels import compiled, torch_attention

Cli = Callable[..., Any]


@pytest.mark.parametrize(("stored", "asked"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_what_another_dtype_computed_is_used(cli: Cli, docs: Path, stored: str, asked: str) -> None:
    ids = cli("precompute", "docs", "--dtype", stored, "-q").out.split()
    for named in (("--chunks", ",".join(ids)), ()):
        answer = cli("ask", "alpha", *named, "--dtype", asked, "--max-tokens", "2", "--verify", "--json").records[0]
        assert {c["status"] for c in answer["chunks"]} <= {"exact", "blended"}
        [note] = [n for n in answer["notes"] if "converted" in n]
        assert f"was computed in {stored} and is converted" in note
        assert f"ask with --dtype {stored}" in note
        assert answer["verify"]["kl"] < 0.05
    own = cli("ask", "alpha", "--chunks", ",".join(ids), "--dtype", stored, "--max-tokens", "1", "--json").records[0]
    assert not [n for n in own["notes"] if "converted" in n]


def test_kv_of_the_own_dtype_is_preferred(cli: Cli, docs: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        cli("precompute", "docs", "--dtype", dtype, "--yes")
    answer = cli("ask", "alpha", "--dtype", "bfloat16", "--max-tokens", "1", "--json").records[0]
    assert not [n for n in answer["notes"] if "converted" in n]


def test_a_hole_is_stored_as_what_computed_it(cli: Cli, docs: Path) -> None:
    ids = cli("precompute", "docs/alpha.md", "--dtype", "float32", "-q").out.split()
    cli("chunks", "prune", "--to-size", "0")  # its KV goes, its text stays
    ask = ("ask", "alpha", "--chunks", ids[0], "--max-tokens", "1", "--json", "--dtype")
    assert cli(*ask, "bfloat16").records[0]["chunks"][0]["status"] == "computed"
    stored = {(r["id"] == ids[0], r["kv_dtype"]) for r in cli("chunks", "ls", "--json").records}
    assert (False, "bfloat16") in stored  # what bfloat16 computed has a name of its own
    computed = cli(*ask, "float32").records[0]["chunks"][0]
    assert (computed["status"], computed["id"]) == ("computed", ids[0])
    assert cli(*ask, "float32").records[0]["chunks"][0]["status"] == "exact"


def test_a_cpu_for_which_onednn_has_no_bfloat16(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one without AVX-512, and without compiled code."""
    monkeypatch.setattr(compiled, "library", lambda: None)
    monkeypatch.setattr(torch_attention, "onednn_multiplies", lambda dtype: dtype == torch.float32)
    ids = cli("precompute", "docs", "--dtype", "bfloat16", "-q").out.split()
    ask = ("ask", "alpha", "--chunks", ",".join(ids), "--dtype", "bfloat16", "--max-tokens", "2", "--verify", "--json")
    [answer] = cli(*ask).records
    assert answer["verify"]["kl"] < 0.05
    [facts] = cli("doctor", "--json").records
    assert facts["ok"]
