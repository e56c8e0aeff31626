"""One command gives one answer: the decoder is chosen by the settings alone, before the first token."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, create_autospec

import pytest
from checkpoints import write_checkpoint
from command_line import Cli
from gguf_files import write_gguf

from cacheblend_cli.engine.connectors.llama_cpp import decoder
from cacheblend_cli.engine.connectors.llama_cpp.library import installed
from cacheblend_cli.engine.connectors.llama_cpp.llama import LlamaCpp

NUM_TOKENS = 12


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF model where llama.cpp is installed."""
    for module in ("xllamacpp", "llama_cpp"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    if installed() is None:
        pytest.skip("neither xllamacpp nor llama-cpp-python is installed: pip install '.[llama-cpp]'")
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F32")
    return tmp_path / "m.gguf"


def ask_twice(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch, **settings: str) -> list[str]:
    """Return the answers of two runs of one command."""
    for name, value in settings.items():
        monkeypatch.setenv(f"CACHEBLEND_{name.upper()}", value)
    command = ["ask", "where does Mara work?", "--model", str(model), "--store", str(model.parent / "store"), "--json"]
    answers = list[str]()
    for _ in range(2):
        result = cli(*command, "--max-tokens", str(NUM_TOKENS), stdin="the lead of billing is Mara, in Bergen\n")
        assert result.code == 0, result.err
        answers.append(json.loads(result.out)["answer"])
    return answers


def test_auto_gives_one_answer_and_loads_no_llama_cpp(cli: Cli, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, run = [], create_autospec(subprocess.run, side_effect=subprocess.run)
    load = ctypes.CDLL.__init__

    def loading(self: ctypes.CDLL, name: str, *args: object, **options: object) -> None:
        opened.append(str(name))
        load(self, name, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ctypes.CDLL, "__init__", loading)
    monkeypatch.setattr(subprocess, "run", run)
    first, second = ask_twice(cli, file, monkeypatch, decode_with="auto")
    assert first
    assert second == first
    assert not [name for name in opened if "llama" in name]
    assert not [call for call in run.call_args_list if "llama" in str(call)]


def test_llama_cpp_decodes_whole_answers_where_it_is_named(
    cli: Cli, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = create_autospec(LlamaCpp.decode, side_effect=LlamaCpp.decode)
    monkeypatch.setattr(LlamaCpp, "decode", decode)
    monkeypatch.setattr(decoder, "check_runs", Mock())
    first, second = ask_twice(cli, file, monkeypatch, decode_with="llama.cpp")
    assert first
    assert second == first
    assert decode.call_count == 2 * (NUM_TOKENS - 1)
    ask_twice(cli, file, monkeypatch, decode_with="auto", decode_model=str(file))
    assert decode.call_count == 4 * (NUM_TOKENS - 1), "naming a file names llama.cpp"
