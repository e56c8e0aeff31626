"""What commands open below the user's own directories, and what they create there."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT, Cli
from gguf_files import write_gguf

# Run commands, and print the files below our directories that were opened otherwise than by private_files.
# LMDB and SQLite open files by name: private_files has to have checked these before.
_WATCH = """
import json, os, sys
import cacheblend_store.private_files as private_files
own, commands = json.loads(sys.argv[1])
own = tuple(os.path.realpath(folder) + os.sep for folder in own)
checked, wrong, seen = set(), set(), set()

def is_own(path):
    return os.path.realpath(os.path.dirname(os.path.abspath(path))).startswith(own)

def on_event(event, arguments):
    if event not in ("open", "sqlite3.connect") or not isinstance(arguments[0], (str, bytes)):
        return
    path = os.fsdecode(arguments[0])
    frame = sys._getframe(1)
    if frame.f_code.co_filename == private_files.__file__:
        return
    if is_own(path) and not os.path.isdir(path):
        seen.add(path)
        if os.path.abspath(path) not in checked:
            wrong.add(f"{event} {path} by {frame.f_code.co_filename}:{frame.f_lineno}")

real_open = private_files.open_file
def open_file(path, *arguments, **more):
    checked.add(os.path.abspath(path))
    return real_open(path, *arguments, **more)
private_files.open_file = open_file

import lmdb
real_lmdb = lmdb.open
def open_lmdb(path, *arguments, **more):
    for name in ("data.mdb", "lock.mdb"):
        if os.path.join(os.path.abspath(path), name) not in checked:
            wrong.add(f"lmdb {path}/{name}")
    seen.add(path)
    return real_lmdb(path, *arguments, **more)
lmdb.open = open_lmdb

sys.addaudithook(on_event)
from cacheblend_cli.cli.main import run
codes = []
for command in commands:
    sys.argv[1:] = command  # a server in the background gets them
    codes.append(run(command))
print(json.dumps({"codes": codes, "wrong": sorted(wrong), "seen": len(seen)}))
"""


def _environment(home: Path, store: Path) -> dict[str, str]:
    names = {"CONFIG": "config", "DATA": "data", "CACHE": "cache", "STATE": "state"}
    folders = {f"XDG_{name}_HOME": str(home / sub) for name, sub in names.items()}
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "documents", ROOT / "store", ROOT / "kernels")))
    return {**os.environ, **folders, "HOME": str(home), "CACHEBLEND_STORE": str(store), "PYTHONPATH": paths}


def test_every_file_of_ours_is_opened_in_one_way(cli: Cli, docs: Path, model: Path, tmp_path: Path) -> None:
    """Also by commands that read GGUF files, keep quantised weights, move, check and remove data."""
    home, store, answers = tmp_path / "home", tmp_path / "own store", tmp_path / "answers.jsonl"
    gguf = tmp_path / "model.gguf"
    write_gguf(model, gguf, "qwen2", "Q8_0")
    commands = [
        ["precompute", str(docs), "--chunk-tokens", "40", "-q"],
        ["ask", "alpha", "--local", "--json", "--max-tokens", "4"],
        ["ask", "--batch", str(docs / "questions.jsonl"), "--resume", str(answers), "--max-tokens", "4"],
        ["search", "alpha", "-q"],
        ["precompute", str(docs), "-q", "--model", str(gguf)],
        ["ask", "alpha", "--local", "--max-tokens", "4", "--model", str(gguf)],
        ["chunks", "ls", "-q"],
        ["chunks", "verify"],
        ["chunks", "compact"],
        ["chunks", "stats"],
        ["config", "set", "top_k", "3", "--user"],
        ["models", "ls"],
        ["serve", "--background", "--port", "0", "--idle-exit", "60"],
        ["ask", "alpha", "--max-tokens", "4"],
        ["serve", "--stop"],
        ["chunks", "rm", "--all", "--yes"],
    ]
    (docs / "questions.jsonl").write_text('{"question": "beta"}\n')
    own = [str(store), *(str(home / sub) for sub in ("data", "cache", "state"))]
    program = [sys.executable, "-c", _WATCH, json.dumps([own, commands])]
    done = subprocess.run(program, env=_environment(home, store), capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["codes"] == [0] * len(commands), done.stderr
    assert not report["wrong"], "\n".join(report["wrong"])
    assert report["seen"] >= 2  # the store and its index
    assert list((home / "cache").rglob("*")), "a run keeps facts about this machine"


def test_what_is_created_is_private_whatever_the_umask(cli: Cli, docs: Path, tmp_path: Path) -> None:
    home, store = tmp_path / "home", tmp_path / "home" / "data" / "cacheblend" / "store"
    commands = [["precompute", str(docs), "-q"], ["ask", "alpha", "--local", "--max-tokens", "4"], ["search", "alpha"]]
    home.mkdir()
    program = (
        "import sys, os, json; os.umask(0); from cacheblend_cli.cli.main import run;"
        "print(json.dumps([run(command) for command in json.loads(sys.argv[1])]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(commands)],
        env=_environment(home, store), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 0, 0], done.stderr
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in home.rglob("*")}
    assert store / "data.mdb" in modes
    assert home / "cache" / "cacheblend" in modes
    assert not {str(path): oct(mode) for path, mode in modes.items() if mode & 0o022}
    assert not {str(path): oct(mode) for path, mode in modes.items() if path.is_file() and mode & 0o077}


@pytest.mark.parametrize("command", [("search", "alpha"), ("ask", "alpha", "--local"), ("chunks", "ls")])
def test_a_fifo_in_place_of_the_store_ends_at_once(cli: Cli, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "store" / "data.mdb")
    result = cli(*command)
    assert result.code == 4
    assert "data.mdb is not a regular file" in result.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_store_of_another_user_is_searched_and_not_written(
    cli: Cli, stored: list[str], tmp_path: Path, mode: int
) -> None:
    store = tmp_path / "store"
    for file in store.iterdir():
        if file.name == "data.mdb":
            os.chown(file, 12345, 12345)
        else:
            file.unlink()
    (store / "search.sqlite3").symlink_to(tmp_path / "victim")
    os.chown(store, 12345, 12345)
    store.chmod(mode)
    assert cli("search", "alpha").code == 0
    assert cli("ask", "alpha", "--local", "--max-tokens", "2").code == 0
    assert cli("serve", "--status").code == 3
    assert cli("precompute", "docs").code == 4
    assert not (tmp_path / "victim").exists()
    assert sorted(f.name for f in store.iterdir()) == ["data.mdb", "search.sqlite3"]
