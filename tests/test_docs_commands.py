"""The commands of the front page, of the tutorial and of the how-to pages do what is said: they are run, in order."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cacheblend_cli.cli.main import run
from cacheblend_cli.demo import handbook_dir
from cacheblend_cli.model.named import INSTALL

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = re.compile(r"^    \$ (.+)$", re.MULTILINE)


def commands(name: str) -> list[str]:
    return COMMAND.findall((DOCS / name).read_text(encoding="utf-8"))


def pipeline(line: str) -> list[list[str]]:
    """The commands of a line without redirections, each as a list of words."""
    parts: list[list[str]] = [[]]
    for word in shlex.split(line):
        if word == "|":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def execute(line: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a line; cacheblend in this process, which has torch loaded already. Returns stdout."""
    if "cacheblend " not in line or line.startswith("printf"):
        return subprocess.run(["bash", "-ec", line], capture_output=True, text=True, check=True).stdout
    out = ""
    for words in pipeline(line):
        if words[0] != "cacheblend":
            out = subprocess.run(words, input=out, capture_output=True, text=True, check=True).stdout
            continue
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(out.encode()), encoding="utf-8"))
        code = run(words[1:])
        out, err = capfd.readouterr()
        assert code == 0, f"{line}\n{err}"
    return out


@pytest.mark.parametrize("name", ["tutorial.md", "how-to.md"])
def test_the_commands_work(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    lines = commands(name)
    assert len(lines) > 10
    if name != "tutorial.md":  # over the folder the tutorial leaves
        for line in commands("tutorial.md"):
            if "cacheblend" not in line or line.endswith("precompute notes"):
                execute(line, capfd, monkeypatch)
    for line in lines:
        out = execute(line, capfd, monkeypatch)
        told = not any(
            word in line for word in ("mkdir", "printf", "precompute", "import", "export", "prune", "verify --")
        )
        assert out.strip() or not told, line
    assert name != "tutorial.md" or (tmp_path / "answer.html").is_file()


def test_what_the_tutorial_asks_is_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    for line in commands("tutorial.md"):
        if "cacheblend" not in line or line.endswith("precompute notes"):
            execute(line, capfd, monkeypatch)
    assert "billing.md" in execute('cacheblend search "billing team"', capfd, monkeypatch).splitlines()[1]


def test_the_reference_and_the_manual_say_what_help_says() -> None:
    """Where this fails: python -m tools.reference."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.reference", "--check"],
        cwd=DOCS.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_front_page_is_short() -> None:
    assert len((DOCS.parent / "README.md").read_text(encoding="utf-8").splitlines()) < 150


README = DOCS.parent / "README.md"
ELSEWHERE = {"pip install .": "test_wheel.py"}
"""Commands that another test runs."""


def test_the_front_page_does_what_it_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the demo's handbook, whose question and answer the page shows."""
    text = README.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    (tmp_path / "docs").symlink_to(handbook_dir())
    found = re.findall(r"^    (?:\$ )?((?:pip|cacheblend|make|python) .+)$", text, re.MULTILINE)
    lines = [shlex.join(shlex.split(line, comments=True)) for line in found]
    assert len(lines) >= 4
    outs = [execute(line, capfd, monkeypatch) for line in lines if line not in ELSEWHERE]
    assert all((DOCS.parent / "tests" / name).is_file() for name in ELSEWHERE.values())
    [shown] = re.findall(r"^    \$ cacheblend ask .+\n    (.+)$", text, re.MULTILINE)
    assert outs[-1] == f"{shown}\n"


def test_what_the_front_page_names_is_there() -> None:
    text, known = README.read_text(encoding="utf-8"), (DOCS / "reference.md").read_text(encoding="utf-8")
    makefile = (DOCS.parent / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"`([^`\n]+)`", text)
    for code in named:
        command, *words = code.split()
        if command == "make":
            assert f"\n{words[0]}:" in f"\n{makefile}", code
        elif command == "python":
            assert (DOCS.parent / words[0]).is_file(), code
        elif command == "pip":
            assert code == INSTALL
        elif command == "cacheblend":
            assert f"## {code}\n" in known, code
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]+", code):
            assert flag in known or command == "pip", code
    assert {"make", "python", "pip", "cacheblend"} <= {code.split()[0] for code in named}
