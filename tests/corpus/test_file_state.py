"""Whether a file is as it was when it was read: by inode, size, times and the code that read it."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cacheblend_cli.corpus import documents
from cacheblend_cli.corpus.documents import FileState, reader_of

SECOND = 10**9
READ = FileState(1, 100, 50 * SECOND, 60 * SECOND, "from_markdown 1", 70 * SECOND)


def test_a_file_is_as_it_was_if_nothing_of_it_differs() -> None:
    assert READ.still_holds(replace(READ, read_ns=900 * SECOND))
    for name, value in {
        "inode": 2, "size": 101, "mtime_ns": 50 * SECOND + 1, "ctime_ns": 60 * SECOND + 1, "reader": "from_markdown 2",
    }.items():  # fmt: skip
        assert not READ.still_holds(replace(READ, **{name: value})), name


def test_a_clock_that_was_set_back_makes_no_change_pass() -> None:
    assert not READ.still_holds(replace(READ, mtime_ns=10 * SECOND, ctime_ns=10 * SECOND, read_ns=11 * SECOND))
    from_the_future = replace(READ, ctime_ns=80 * SECOND)  # read after the clock was set back
    assert not from_the_future.still_holds(from_the_future)


@pytest.mark.parametrize(("age_s", "holds"), [(0.0, False), (1.9, False), (2.0, True)])
def test_a_file_that_changed_just_before_it_was_read_is_read_again(age_s: float, holds: bool) -> None:
    """As in git's index: a second change within the file system's resolution would leave the same times."""
    for name in ("mtime_ns", "ctime_ns"):
        state = replace(READ, **{name: READ.read_ns - round(age_s * SECOND)})
        assert state.still_holds(state) == holds


def test_the_state_of_a_link_is_that_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("a")
    (tmp_path / "b.md").write_text("b")
    (tmp_path / "link.md").symlink_to("a.md")
    first = FileState.of(str(tmp_path / "link.md"))
    assert first is not None
    assert first.inode == (tmp_path / "a.md").stat().st_ino
    os.replace(tmp_path / "b.md", tmp_path / "a.md")
    second = FileState.of(str(tmp_path / "link.md"))
    assert second is not None
    assert second.inode != first.inode
    (tmp_path / "a.md").unlink()
    assert FileState.of(str(tmp_path / "link.md")) is None


def test_a_state_is_recorded_and_a_damaged_record_is_none(tmp_path: Path) -> None:
    assert FileState.of_summary(asdict(READ)) == READ
    for recorded in ({}, {**asdict(READ), "size": "x"}):
        assert FileState.of_summary(recorded) is None


def test_files_are_read_again_by_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("a.md", "a.pdf", "a.docx", "README", "a.unknown", ".gitignore")
    before = {name: reader_of(name) for name in names}
    assert before["a.md"] != before["a.pdf"] != before["a.docx"]
    for attribute, value in {"READ_VERSION": 0, "__version__": "9"}.items():
        with monkeypatch.context() as patched:
            _forget()
            patched.setattr(documents, attribute, value)
            assert all(reader_of(name) != before[name] for name in names)
    with monkeypatch.context() as patched:
        _forget()
        patched.setattr(documents, "version", lambda package: "0")
        assert {name for name in names if reader_of(name) != before[name]} == {"a.pdf", "a.docx"}
    _forget()


def _forget() -> None:
    documents._reader.cache_clear()
