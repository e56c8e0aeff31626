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
from cacheblend_cli.engine.config import POOL_DTYPES
from cacheblend_cli.model.description import DTYPES, WEIGHT_DTYPES
from cacheblend_cli.settings import Settings
from cacheblend_cli.types import blend

COMMANDS = """
import contextlib, io, json
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        code = run(command)
    print(json.dumps([code, err.getvalue(), "torch" in sys.modules]))
"""
CASES = {
    "ask q --selector wrong": (2, "unknown selector 'wrong'"),
    "ask q --selector first+query": (2, "NAME:COUNT"),
    "ask q --ratio 15%": (2, "hint: write 0.15"),
    "ask q --ratio 15": (2, "not between 0 and 1"),
    "ask q --mode fast": (2, "unknown --mode 'fast'"),
    "ask q --search wrong": (2, "known: auto, words, meaning, both"),
    "ask q --dtype float8": (2, "unknown --dtype 'float8'"),
    "ask q --device gpu": (2, "unknown device 'gpu'"),
    "ask q --max-tokens 0": (2, "--max-tokens is at least 1"),
    "ask q --prompt nosuch": (3, "no prompt file nosuch"),
    "ask q --chunks nosuch.txt": (3, "neither a chunk id nor a file"),
    "ask q --chunks ffff": (3, "no chunk has an id that begins with ffff"),
    "ask q --source nosuch.md": (3, "no stored document matches nosuch.md"),
    "ask q --json-schema nosuch": (3, "no such file: nosuch"),
    "ask q --html nosuch/a.html": (2, "there is no directory nosuch"),
    "ask q --lora nosuch": (3, "no LoRA adapter nosuch"),
    "ask q --store nosuch": (3, "there is no store at nosuch"),
    "ask q --model ./nosuch": (3, "no model directory ./nosuch"),
    "ask q --model handbok": (3, "did you mean handbook?"),
    "ask q --model a/b": (3, "model a/b is not a local directory"),
    "ask --batch nosuch": (3, "no such file: nosuch"),
    "chat --selector wrong": (2, "unknown selector"),
    "chat --chunks nosuch": (3, "neither a chunk id nor a file"),
    "serve --mode fast": (2, "unknown --mode"),
    "models show handbok": (3, "did you mean handbook?"),
    "models check handbok": (3, "did you mean handbook?"),
    "models check handbook --questions nosuch": (3, "no such file: nosuch"),
    "precompute nosuch": (3, "no such file or directory: nosuch"),
    "precompute empty": (2, "no document was found"),
    "precompute a.md --model handbok": (3, "did you mean handbook?"),
    "precompute a.md --lora nosuch": (3, "no LoRA adapter nosuch"),
    "precompute a.md --kv-dtype int9": (2, "unknown --kv-dtype 'int9'"),
    "precompute a.md --attention-backend flash": (2, "known: auto, torch, triton, xformers"),
    "precompute a.md --chunk-tokens 0": (2, "--chunk-tokens 0 is not 1 or more"),
    "precompute a.md --overlap 400": (2, "half of --chunk-tokens 512"),
    "precompute a.md --window 0": (2, "hint: 2048 is the default"),
    "precompute a.md --date tomorrow": (2, "--date tomorrow is not a date"),
    "eval nosuch.json": (3, "no such file: nosuch.json"),
    "eval q.json --selector wrong": (2, "unknown selector 'wrong'"),
    "eval q.json --correction wrong": (2, "known: regression, none"),
    "eval q.json --context wrong": (2, "known: sink, document, neighbours"),
    "eval q.json --ratio 3": (2, "not between 0 and 1"),
    "eval q.json --mode fast": (2, "unknown mode 'fast'"),
    "eval q.json --model handbok": (3, "did you mean handbook?"),
    "bench --selector wrong": (2, "unknown selector 'wrong'"),
    "bench --ratio 3": (2, "not between 0 and 1"),
    "bench --model handbok": (3, "did you mean handbook?"),
}


def test_wrong_values_are_reported_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    (tmp_path / "a.md").write_text("Mara leads billing.\n")
    (tmp_path / "q.json").write_text('{"question": "who?", "ctxs": [{"text": "Mara leads billing."}]}')
    (tmp_path / "empty").mkdir()
    assert run(["precompute", "a.md", "-q"]) == 0
    done = process(json.dumps([command.split() for command in CASES]), code=COMMANDS)
    assert done.code == 0, done.err
    for (command, (code, text)), (found, err, has_torch) in zip(CASES.items(), done.records, strict=True):
        assert (found, text in err, has_torch) == (code, True, False), (command, err)


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
    assert known["kv_pool_dtype"] == POOL_DTYPES
    assert known["mode"] == blend.MODES
    assert known["context"] == search.CONTEXTS
    assert (known["on_weak_match"], known["search"]) == (search.ON_WEAK_MATCH, ("auto", *search.BY))


def test_doctor_shows_what_needs_no_torch_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    done = process("doctor", code='sys.modules["torch"] = None; sys.exit(run(sys.argv[1:]))')
    sections = [line for line in done.out.splitlines() if not line.startswith(" ")]
    assert sections[:3] == ["versions", "store", "device"]
    assert "does not exist yet" in done.out
