"""Commands in README, tutorial and how-to are run in order."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cacheblend_cli.cli.main import run
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
            if "cacheblend" not in line or line.endswith(("demo --write notes", "precompute notes")):
                execute(line, capfd, monkeypatch)
    for line in lines:
        out = execute(line, capfd, monkeypatch)
        prints = not any(
            word in line for word in ("mkdir", "printf", "precompute", "push", "pull", "prune", "verify --")
        )
        assert out.strip() or not prints, line
    assert name != "tutorial.md" or (tmp_path / "answer.html").is_file()


def test_search_finds_the_page_that_the_tutorial_asks_about(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    for line in commands("tutorial.md"):
        if "cacheblend" not in line or line.endswith(("demo --write notes", "precompute notes")):
            execute(line, capfd, monkeypatch)
    assert "parking.md" in execute('cacheblend search "parking permit"', capfd, monkeypatch).splitlines()[1]


def test_generated_pages_are_current() -> None:
    """Where this fails: python -m tools.reference."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.reference", "--check"],
        cwd=DOCS.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


README = DOCS.parent / "README.md"


def test_the_commands_of_the_front_page_work(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever model there is; what SmolLM2 answers is in tests/demo/test_first_minute.py, and installation in
    test_wheel.py."""
    text = README.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    lines = re.findall(r"^    (cacheblend .+)$", text, re.MULTILINE)
    assert len(lines) >= 3
    outs = [execute(line, capfd, monkeypatch) for line in lines]
    assert outs[-1].strip()


def test_the_page_on_installing_names_the_pinned_model() -> None:
    page = (DOCS / "install.md").read_text(encoding="utf-8")
    assert INSTALL in re.findall(r"^    (pip install .+)$", page, re.MULTILINE)


def test_the_page_on_installing_names_every_extra() -> None:
    declared = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (DOCS / "install.md").read_text(encoding="utf-8")
    rows = page.partition("| extra | for |")[2].partition("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(declared["optional-dependencies"]) - {"dev"}


def test_commands_and_flags_of_the_front_page_exist() -> None:
    text, known = README.read_text(encoding="utf-8"), (DOCS / "reference.md").read_text(encoding="utf-8")
    makefile = (DOCS.parent / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"`([^`\n]+)`", text)
    for code in named:
        command, *words = code.split()
        if command == "make":
            assert f"\n{words[0]}:" in f"\n{makefile}", code
        elif command == "cacheblend":
            assert f"## {' '.join(code.split(' -')[0].split())}\n" in known, code
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]+", code):
            assert flag in known, code
    assert {"make", "cacheblend"} <= {code.split()[0] for code in named}
