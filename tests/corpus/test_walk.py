"""Files read from a folder: the ones ripgrep would search, and reasons for skipping others."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from files import write

from cacheblend_cli.corpus.documents import Document, Skipped, read_documents, reader_of
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.corpus.walk import ALL, Selection
from cacheblend_cli.errors import UsageError


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
    for name in ("a.md", "sub/b.md", "sub/c.txt", "sub/d.xyz", "sub/e/f.md"):
        write(here / "docs" / name, "x\n")
    assert taken("docs", select=Selection(exclude=("sub/*.md", "e/"))) == ["docs/a.md", "docs/sub/c.txt"]
    assert taken("docs", select=Selection(include=("*.xyz",))) == ["docs/sub/d.xyz"], "whatever its suffix"
    found = taken("docs", select=Selection(include=("*.md", "*.txt"), exclude=("/sub/e",)))
    assert found == ["docs/a.md", "docs/sub/b.md", "docs/sub/c.txt"]
    assert taken("docs/sub/c.txt", select=Selection(include=("*.md",))) == ["docs/sub/c.txt"], "it is named"


def test_what_is_passed_over_is_counted_by_its_reason(here: Path) -> None:
    for name in ("a.md", "b.png", "c.PNG", "README"):
        write(here / "docs" / name, "text\n")
    write(here / "docs/program", b"\x7fELF\0")
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
        "docs/b.png": ".png", "docs/c.PNG": ".png", "docs/program": "binary without a suffix", "docs/large.md": "over 0.00195 MB",
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


def test_a_file_without_a_suffix_is_read_if_it_is_text(here: Path) -> None:
    cut = "\u00e9".encode() * 5000  # the peek ends within a character
    texts = {"README": b"a\n", "notes": b"b\n", "odd": b"c" + cut, "wide": "d\n".encode("utf-16")}
    for name, data in {**texts, "program": b"\x7fELF\0\0", "latin": b"caf\xe9\n", "zeros": b"text\0"}.items():
        write(here / "docs" / name, data)
    os.mkfifo(here / "docs/pipe")
    assert taken("docs") == [f"docs/{name}" for name in sorted(texts)]
    binary = dict.fromkeys(("docs/latin", "docs/program", "docs/zeros"), "binary without a suffix")
    assert passed_over("docs") == {**binary, "docs/pipe": "not a regular file"}
    reads = {name: reader_of(name).split()[0].partition(":")[2] for name in ("Makefile", "README", "notes")}
    assert reads == {"Makefile": "from_code", "README": "from_plain", "notes": "from_plain"}


def test_an_ignore_file_that_is_not_a_small_regular_file_below_the_repository_is_not_read(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[str]()
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(path) or real_open(path, *rest, **more))
    for folder in ("pipe", "device", "outward", "folder", "inward"):
        write(here / "docs" / folder / "a.md", f"{folder}\n")
    os.mkfifo(here / "docs/pipe/.gitignore")
    (here / "docs/device/.ignore").symlink_to("/dev/zero")
    write(here / "rules", "*.md\n")
    (here / "docs/outward/.gitignore").symlink_to(here / "rules")
    (here / "docs/folder/.gitignore").mkdir()
    write(here / "docs/pipe/rules", "*.md\n")
    (here / "docs/inward/.gitignore").symlink_to("../pipe/rules")
    found = list(read_documents(["docs"], select=lambda path: Selection(exclude=("rules",))))
    assert [shown(d.source) for d in found if isinstance(d, Document)] == [
        f"docs/{folder}/a.md" for folder in ("device", "folder", "outward", "pipe")
    ]
    reasons = {shown(d.source): d.reason.partition(": ")[2] for d in found if isinstance(d, Skipped) and not d.by_rule}
    assert reasons == {
        "docs/pipe/.gitignore": "it is not a regular file", "docs/device/.ignore": "it is a link out of the folder",
        "docs/outward/.gitignore": "it is a link out of the folder", "docs/folder/.gitignore": "it is not a regular file",
    }  # fmt: skip
    assert not any("zero" in str(path) or "pipe/.gitignore" in str(path) for path in opened)


@pytest.mark.parametrize(
    "texts",
    [
        {"docs/.gitignore": "*.md\n" + "#" * (1 << 20)},
        {"docs/.gitignore": "".join(f"*[{chr(i)}-{chr(i + 1)}]\n" for i in range(0x4E00, 0x5200, 2))},
        {"docs/.gitignore": "*a" * 2000 + "\n" + "?b" * 2000 + "\n" + "b*" * 2000 + "\n" + ("*c" * 1500 + "\n") * 7},
        {"docs/" + "sub/" * depth + ".ignore": "*a" * 2000 + "\n" for depth in range(10)},
    ],
    ids=["large", "sets", "wildcards", "in sum"],
)
def test_an_ignore_file_with_too_many_rules_is_an_error(here: Path, texts: dict[str, str]) -> None:
    """Without its rules, private files could be read; with them, each name could take seconds."""
    for name, text in texts.items():
        write(here / name, text)
    write(here / "docs/a.md", "a\n")
    with pytest.raises(UsageError, match="ignore cannot be applied") as caught:
        taken("docs")
    assert "--no-ignore" in (caught.value.hint or "")
    assert taken("docs", select=Selection(no_ignore=True)) == ["docs/a.md"]


def test_a_long_ignore_file_of_names_is_applied(here: Path) -> None:
    write(here / "docs/.gitignore", "".join(f"name{i}.md\n" for i in range(50_000)) + "*.log\n[Bb]in/\n")
    for name in ("a.md", "name49999.md"):
        write(here / "docs" / name, name)
    assert taken("docs") == ["docs/a.md"]


def test_a_link_to_an_ignore_file_may_lead_elsewhere_in_the_repository(here: Path) -> None:
    (here / ".git").mkdir()
    write(here / "rules", "b.md\n")
    for name in ("a.md", "b.md"):
        write(here / "docs" / name, f"{name}\n")
    (here / "docs/.gitignore").symlink_to("../rules")
    assert taken("docs") == ["docs/a.md"]
    assert passed_over("docs") == {}


def nest(folder: Path, levels: int, file_at: int) -> None:
    """Make folders one in another, deeper than the system's limit of a path, with a file at one level."""
    folder.mkdir(parents=True)
    here = os.open(folder, os.O_RDONLY)
    for level in range(levels):
        if level == file_at:
            with open(os.open("b.md", os.O_WRONLY | os.O_CREAT, dir_fd=here), "w") as stream:
                stream.write("b\n")
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


@pytest.mark.parametrize("levels", [1900, 2500])
def test_folders_nested_deeper_than_the_stack_are_walked_as_far_as_the_system_opens_them(
    here: Path, levels: int
) -> None:
    nest(here / "docs/a", levels, file_at=1850)
    try:
        write(here / "docs/z.md", "z\n")
        found = list(read_documents(["docs"]))
        names = [d.source for d in found if isinstance(d, Document)]
        assert names == [f"{here}/docs/a/{'d/' * 1850}b.md", f"{here}/docs/z.md"]
        skipped = [d for d in found if isinstance(d, Skipped)]
        assert [d.group for d in skipped] == ["too long paths"] * (levels > 1900)
        assert all("longer than 4,095 bytes" in d.reason and not d.by_rule for d in skipped)
    finally:
        subprocess.run(["rm", "-r", "docs/a"], check=True)  # pytest's own clean-up recurses


def test_folders_that_link_to_each_other_end(here: Path) -> None:
    for name in ("a", "b"):
        write(here / "docs" / name / "x.md", f"{name}\n")
    (here / "docs/a/to_b").symlink_to("../b")
    (here / "docs/b/to_a").symlink_to("../a")
    assert taken("docs", select=Selection(follow=True)) == ["docs/b/x.md", "docs/a/x.md"]


def test_a_file_after_its_folder_was_included_or_excluded(here: Path) -> None:
    for name in ("a.md", "sub/b.md", "sub/c.tex", "sub/draft/d.md"):
        write(here / "docs" / name, f"{name}\n")
    assert taken("docs", select=Selection(include=("sub/", "!draft"))) == ["docs/sub/b.md", "docs/sub/c.tex"]
    assert taken("docs", select=Selection(include=("/sub/**/d*",))) == ["docs/sub/draft/d.md"]
