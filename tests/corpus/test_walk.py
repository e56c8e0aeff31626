"""What is taken of a folder: as ripgrep would, and what is said of the rest."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from files import write

from cacheblend_cli.corpus.documents import Document, Skipped, read_documents
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.corpus.walk import ALL, Selection


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def taken(*paths: str, listed: tuple[str, ...] = (), select: Selection = ALL) -> list[str]:
    return [shown(d.source) for d in read_documents(paths, listed, lambda path: select) if isinstance(d, Document)]


def passed_over(*paths: str, listed: tuple[str, ...] = (), select: Selection = ALL) -> dict[str, str]:
    """path -> what it is counted as"""
    return {d.typed: d.group for d in read_documents(paths, listed, lambda path: select) if isinstance(d, Skipped)}


TREE = (
    "a.md", "build/b.md", "docs/c.md", "docs/draft-d.md", "docs/keep/draft-e.md", "docs/.hidden/f.md", "docs/.g.md", "docs/out/h.md",
    "docs/out/deep/i.md", "top.md", "docs/top.md", "docs/space  and\nnewline \U0001f600.md", "docs/#j.md", "docs/x[1].md", "only.ignored.md",
)  # fmt: skip
RULES = {
    ".gitignore": "# comment\nbuild/\n/top.md\ndraft-*\n!docs/keep/draft-e.md\n*.ignored.md\n\\#j.md\n",
    "docs/.gitignore": "out/*\n!out/h.md\n",
    ".ignore": "x[[]1].md\n!only.ignored.md\n",
}


@pytest.fixture
def tree(here: Path) -> Path:
    for name in TREE:
        write(here / name, f"{name}\n")
    for name, text in RULES.items():
        write(here / name, text)
    (here / ".git").mkdir()
    return here


def test_ignored_and_hidden_files_are_left_out_without_a_word(tree: Path) -> None:
    expected = {
        "a.md", "docs/c.md", "docs/keep/draft-e.md", "docs/out/h.md", "docs/space  and\nnewline \U0001f600.md", "docs/top.md",
        "only.ignored.md",
    }  # fmt: skip
    assert set(taken(".")) == expected
    assert passed_over(".") == {}
    assert set(taken("docs")) == {name for name in expected if name.startswith("docs/")}, "the rules above count"
    assert taken("build") == ["build/b.md"], "what is named is read"
    assert taken("docs/.g.md", "top.md") == ["docs/.g.md", "top.md"]
    no_rules = set(taken(".", select=Selection(no_ignore=True)))
    assert no_rules == {name for name in TREE if "/." not in name}


@pytest.mark.skipif(shutil.which("rg") is None, reason="ripgrep is not installed")
@pytest.mark.parametrize("folder", [".", "build"])  # not docs: ripgrep < 15 misreads a parent's rules with paths
def test_ripgrep_takes_the_same_files(tree: Path, folder: str) -> None:
    found = subprocess.run(["rg", "--files", "-0", folder], capture_output=True, text=True, check=True).stdout
    assert {os.path.normpath(name) for name in found.split("\0") if name} == set(taken(folder))


@pytest.mark.parametrize("folder", [".", "docs"])
def test_git_leaves_out_the_same_files(tree: Path, folder: str) -> None:
    shutil.rmtree(tree / ".git")
    (tree / ".ignore").unlink()
    subprocess.run(["git", "init", "-q"], check=True)
    (tree / ".git/info/exclude").write_text("a.md\n")
    found = subprocess.run(
        ["git", "ls-files", "-z", "--others", "--exclude-standard", folder], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    assert {name for name in found if name.endswith(".md") and "/." not in name} == set(taken(folder))


def test_include_and_exclude_go_by_the_folder_that_was_named(here: Path) -> None:
    for name in ("a.md", "sub/b.md", "sub/c.txt", "sub/d.tex", "sub/e/f.md"):
        write(here / "docs" / name, "x\n")
    assert taken("docs", select=Selection(exclude=("sub/*.md", "e/"))) == ["docs/a.md", "docs/sub/c.txt"]
    assert taken("docs", select=Selection(include=("*.tex",))) == ["docs/sub/d.tex"], "whatever its suffix"
    found = taken("docs", select=Selection(include=("*.md", "*.txt"), exclude=("/sub/e",)))
    assert found == ["docs/a.md", "docs/sub/b.md", "docs/sub/c.txt"]
    assert taken("docs/sub/c.txt", select=Selection(include=("*.md",))) == ["docs/sub/c.txt"], "it is named"


def test_what_is_passed_over_is_counted_by_its_reason(here: Path) -> None:
    for name in ("a.md", "b.png", "c.PNG", "nosuffix", "README"):
        write(here / "docs" / name, "text\n")
    write(here / "docs/large.md", "x" * 3000)
    write(here / "docs/scan.pdf", b"not one")
    (here / "far").mkdir()
    write(here / "far/x.md", "x\n")
    (here / "docs/link").symlink_to(here / "far")
    (here / "docs/circle").symlink_to(here / "docs")
    (here / "docs/file.md").symlink_to(here / "far/x.md")
    (here / "docs/more").mkdir()
    write(here / "docs/more/.page", "text\n")
    (here / "docs/more/inside.md").symlink_to(".page")
    (here / "docs/passwords.md").symlink_to("/etc/passwd")
    small = Selection(max_file_size=2 << 10)
    assert set(taken("docs", select=small)) == {"docs/a.md", "docs/README", "docs/more/.page"}, (
        "links within are followed"
    )
    assert passed_over("docs", select=small) == {
        "docs/b.png": ".png", "docs/c.PNG": ".png", "docs/nosuffix": "without a suffix", "docs/large.md": "over 0.00195 MB",
        "docs/file.md": "links out of the folder", "docs/passwords.md": "links out of the folder",
        "docs/link": "linked folders", "docs/circle": "linked folders", "docs/scan.pdf": "damaged or locked",
    }  # fmt: skip
    followed = Selection(follow=True)
    assert set(taken("docs", select=followed)) == {
        "docs/a.md", "docs/README", "docs/more/.page", "docs/large.md", "far/x.md", "/etc/passwd",
    }  # fmt: skip
    assert taken("docs/large.md", select=small) == ["docs/large.md"]


def test_listed_files_are_passed_over_where_no_converter_knows_them(here: Path) -> None:
    for name in ("a.md", ".hidden.md", "b.png"):
        write(here / name, "text\n")
    assert taken(listed=("a.md", ".hidden.md", "b.png")) == ["a.md", ".hidden.md"]
    assert passed_over(listed=("a.md", "b.png")) == {"b.png": ".png"}


def test_a_broken_rule_is_no_rule(here: Path) -> None:
    write(here / ".gitignore", b"!\n\xff\n///\nb.md\n")
    write(here / "a.md", "a\n")
    write(here / "b.md", "b\n")
    assert taken(".") == ["a.md"]


def test_a_link_that_cannot_be_followed_is_passed_over(here: Path) -> None:
    """As one into a directory that this user may not enter: the others are read all the same."""
    write(here / "docs/a.md", "a\n")
    (here / "docs/b.md").symlink_to("x" * 300)
    assert taken("docs") == ["docs/a.md"]
    assert passed_over("docs") == {"docs/b.md": "unreadable"}
