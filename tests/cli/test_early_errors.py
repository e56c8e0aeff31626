"""Errors that need neither torch nor the model come before torch is imported."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from cacheblend_kernels import BACKENDS
from command_line import process

from cacheblend_cli.blend import corrections, selectors
from cacheblend_cli.cli.main import run
from cacheblend_cli.corpus import search
from cacheblend_cli.engine.config import DECODERS, POOL_DTYPES
from cacheblend_cli.model.linear import WEIGHT_DTYPES
from cacheblend_cli.model.loading import DTYPES
from cacheblend_cli.settings import Settings
from cacheblend_cli.types import blend

WITHOUT_TORCH = """
import contextlib, io, json
sys.modules["torch"] = None  # importing it fails
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        code = run(command)
    print(json.dumps([code, err.getvalue()]))
"""
CASES = {
    "--selector wrong": (2, "unknown selector 'wrong'"),
    "--selector first+query": (2, "NAME:COUNT"),
    "--ratio 15%": (2, "hint: write 0.15"),
    "--ratio 15": (2, "not between 0 and 1"),
    "--correction wrong": (2, "known: regression, none"),
    "--mode fast": (2, "unknown --mode 'fast'"),
    "--search wrong": (2, "known: auto, words, meaning, both"),
    "--kv-dtype int9": (2, "unknown --kv-dtype 'int9'"),
    "--dtype float8": (2, "unknown --dtype 'float8'"),
    "--device gpu": (2, "unknown device 'gpu'"),
    "--attention-backend flash": (2, "known: auto, torch, triton, xformers"),
    "--gpu-memory-utilization 3": (2, "--gpu-memory-utilization 3"),
    "--max-tokens 0": (2, "--max-tokens is at least 1"),
    "--prompt nosuch": (3, "no prompt file nosuch"),
    "--chunks nosuch.txt": (3, "neither a chunk id nor a file"),
    "--store nosuch": (3, "there is no store at nosuch"),
    "--model ./nosuch": (3, "no model directory ./nosuch"),
    "--model handbok": (3, "did you mean handbook?"),
    "--model a/b": (3, "model a/b is not a local directory"),
}


def test_wrong_values_are_reported_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    (tmp_path / "a.md").write_text("Mara leads billing.\n")
    assert run(["precompute", "a.md", "-q"]) == 0
    commands = [["ask", "Who leads billing?", *flags.split()] for flags in CASES]
    commands += [["models", "show", "handbok"], ["chat", "--selector", "wrong"], ["serve", "--mode", "fast"]]
    commands += [["precompute", "a.md", "--model", "handbok"]]
    expected = [*CASES.values(), (3, "did you mean handbook?"), (2, "unknown selector"), (2, "unknown --mode")]
    expected += [(3, "did you mean handbook?")]
    done = process(json.dumps(commands), code=WITHOUT_TORCH)
    assert done.code == 0, done.err
    for command, (code, text), (found, err) in zip(commands, expected, done.records, strict=True):
        assert (found, text in err) == (code, True), (command, err)


def test_the_place_of_a_wrong_value_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cacheblend.toml").write_text("mode = 'fast'\n")
    done = process("ask", "who?")
    assert (done.code, done.err.splitlines()[0]) == (
        2, f"error: unknown mode 'fast' in {tmp_path / 'cacheblend.toml'}"
    )  # fmt: skip


def test_names_known_without_torch_are_those_that_exist() -> None:
    known = {field.name: field.metadata.get("choices") for field in fields(Settings)}
    assert all(issubclass(getattr(selectors, name), selectors.Selector) for name in blend.SELECTORS.values())
    assert known["correction"] == (*corrections.CORRECTIONS, "none")
    assert known["attention_backend"] == ("auto", *BACKENDS)
    assert known["dtype"] == ("auto", *DTYPES)
    assert known["weight_dtype"] == WEIGHT_DTYPES
    assert known["decode_with"] == DECODERS
    assert known["kv_pool_dtype"] == POOL_DTYPES
    assert (known["mode"], known["deviation"]) == (blend.MODES, blend.DEVIATIONS)
    assert (known["context"], known["order"]) == (search.CONTEXTS, search.ORDERS)
    assert (known["on_weak_match"], known["search"]) == (search.ON_WEAK_MATCH, ("auto", *search.BY))


def test_doctor_shows_what_needs_no_torch_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    done = process("doctor", code='sys.modules["torch"] = None; sys.exit(run(sys.argv[1:]))')
    sections = [line for line in done.out.splitlines() if not line.startswith(" ")]
    assert sections[:3] == ["versions", "store", "device"]
    assert "does not exist yet" in done.out
