"""Patterns of ignore files: git's verdicts, and work that grows with the path, not with the patterns."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from cacheblend_cli.corpus.ignore_patterns import IgnorePatterns, _Automaton

_NAMES = ("a", "b", "ab", "a]", "ba", "foo", "foo.c", "b-", "a b", "-", "a*", "x\\y", "#a", "!b", "a ", "A1")
_ATOMS = (
    "a", "b", "foo", ".c", "*", "**", "***", "?", "/", "**/", "/**", "/**/", "[ab]", "[!a]", "[^a-c]", "[]", "[", "]", "[]-]", "[a-]",
    "[b-a]", "[a/b]", "[\\]]", "[[:alpha:]]", "[^[:digit:]b]", "[[:x:]]", "[[:]", "\\", "\\*", "\\/", "\\#", "#", "!", "-", " ", "\t",
)  # fmt: skip


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_verdicts_are_those_of_git(tmp_path: Path) -> None:
    """For `?` and sets with one exception: git matches them with a byte, this matches them with a character."""
    rng, paths = random.Random(1), list[tuple[str, bool]]()

    def make(folder: str, depth: int) -> None:
        for name in rng.sample(_NAMES, 5):
            is_folder = depth < 3 and rng.random() < 0.6
            paths.append((folder + name, is_folder))
            if is_folder:
                (tmp_path / folder / name).mkdir()
                make(f"{folder}{name}/", depth + 1)
            else:
                (tmp_path / folder / name).touch()

    make("", 0)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for _ in range(200):
        lines = ("".join(rng.choices(_ATOMS, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 3)))
        text = "".join(f"{line}\r\n" if rng.random() < 0.2 else f"{line}\n" for line in lines)
        (tmp_path / ".gitignore").write_text(text, newline="")
        asked = subprocess.run(
            ["git", "check-ignore", "--no-index", "--stdin", "-z"],
            cwd=tmp_path, input="\0".join(path for path, _ in paths), capture_output=True, text=True,
        )  # fmt: skip
        assert {path for path in asked.stdout.split("\0") if path} == ignored(text, paths), repr(text)


def ignored(text: str, paths: list[tuple[str, bool]]) -> set[str]:
    """Return the paths that the patterns ignore, and what is below them. paths: (path, is a folder), parents first."""
    patterns = IgnorePatterns.of_text(text)
    folders, found = {"": patterns.top}, set[str]()
    for path, is_folder in paths:
        parent, _, name = path.rpartition("/")
        if parent in found or patterns.verdict(folders[parent], name, is_folder=is_folder):
            found.add(path)
        if is_folder:
            folders[path] = patterns.within(folders[parent], name)
    return found


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("*.md", "a/b.md", True), ("*.md\n!b.md", "b.md", False), ("build/", "build", None), ("build/", "build/", True),
        ("/a.md", "a.md", True), ("a/*.md", "a/b/c.md", None), ("a/**/c.md", "a/c.md", True), ("a/**/c.md", "a/b/b/c.md", True),
        ("**/c", "a/b/c", True), ("a/**", "a/", None), ("a/**", "a/b/c", True), ("\\#a", "#a", True), ("#a", "#a", None),
        ("\\!a", "!a", True), ("a\\ ", "a ", True), ("a ", "a", True), ("\ufeffa", "a", True), ("a?c", "a\u00e9c", True), ("a?c", "a/c", None),
        ("x[0-9]", "x5", True), ("x[!0-9]", "x5", None), ("a[", "a[", None), ("a\\", "a\\", None), ("a\0b", "a", True),
    ],
)  # fmt: skip
def test_patterns_as_in_the_manual_of_git(text: str, path: str, expected: bool | None) -> None:
    patterns, names = IgnorePatterns.of_text(text), path.rstrip("/").split("/")
    folder = patterns.top
    for name in names[:-1]:
        folder = patterns.within(folder, name)
    assert patterns.verdict(folder, names[-1], is_folder=path.endswith("/")) is expected


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Characters that automatons have looked at."""
    found, step = list[str](), _Automaton.step

    def counted(self: _Automaton, state: int, c: str) -> int:
        found.append(c)
        return step(self, state, c)

    monkeypatch.setattr(_Automaton, "step", counted)
    return found


@pytest.mark.parametrize(
    "pattern", ["*a" * 40 + "*b", "**/" * 400 + "b", "/**/a" * 400 + "/b", "*[a-b]" * 400 + "c", "?" * 255 + "*a*b"]
)
def test_the_work_for_a_path_is_a_step_a_character(pattern: str, steps: list[str]) -> None:
    patterns = IgnorePatterns([pattern] * 10)
    folder = patterns.top
    for _ in range(20):
        folder = patterns.within(folder, "a" * 100)
    steps.clear()
    assert patterns.verdict(folder, "a" * 250, is_folder=False) is None
    assert 0 < len(steps) <= 250


def test_names_and_paths_without_wildcards_cost_no_steps(steps: list[str]) -> None:
    patterns = IgnorePatterns.of_text("".join(f"name{i}\n/path/{i}/\n" for i in range(40_000)) + "!name7\n")
    below = patterns.within(patterns.top, "path")
    verdicts = [patterns.verdict(below, name, is_folder=True) for name in ("name39999", "39999", "name7", "x")]
    assert (verdicts, steps) == ([True, True, False, None], [])


def test_masks_of_many_characters_are_not_all_kept() -> None:
    patterns = IgnorePatterns(["*[x-z]"])
    for c in map(chr, range(0x4E00, 0x5E00)):
        patterns.verdict(patterns.top, c, is_folder=False)
    assert len(patterns._automaton._masks) <= 256


def test_a_pattern_with_wildcards_longer_than_any_path_is_disregarded() -> None:
    assert not IgnorePatterns(["[" + "[:" * 4000 + "x]"])
