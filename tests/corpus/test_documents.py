"""Reading documents: files that are read, their order, and reasons for skipping others."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from cacheblend_documents.converted import Converted

from cacheblend_cli.corpus import documents
from cacheblend_cli.corpus.documents import Conversions, Document, Skipped, read_documents
from cacheblend_cli.corpus.places import place_of, shown
from cacheblend_cli.corpus.walk import ALL, Selection
from cacheblend_cli.errors import NotFoundError, UsageError

ICONV = "convert it: iconv -f cp1252 -t utf-8 FILE"


def read(*paths: Path | str, selection: Selection = ALL) -> dict[str, str]:
    """source -> text, or the reason in brackets; a file that is no document under the path that led to it."""
    return {
        shown(d.source) if isinstance(d, Document) else d.typed: d.text if isinstance(d, Document) else f"[{d.reason}]"
        for d in read_documents([str(p) for p in paths], select=lambda path: selection)
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_directories_are_walked_in_order_without_hidden_names(here: Path) -> None:
    for name in ("docs/b.md", "docs/a.txt", "docs/sub/c.rst", "docs/.git/d.md", "docs/.hidden.md", "docs/e.py"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(f"{name}\n")
    expected = ["docs/a.txt", "docs/b.md", "docs/e.py", "docs/sub/c.rst"]
    assert list(read("docs")) == list(read("./docs/")) == expected


def test_a_named_file_is_read_whatever_its_suffix_and_only_once(here: Path) -> None:
    (here / "notes.py").write_text("text\n")
    (here / "a.md").write_text("a\n")
    assert read("notes.py", "a.md", ".", "notes.py") == {"notes.py": "text\n", "a.md": "a\n"}


def test_text_has_unix_line_ends_no_byte_order_mark_and_a_last_newline(here: Path) -> None:
    (here / "a.md").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree")
    assert read("a.md") == {"a.md": "one\ntwo\nthree\n"}


@pytest.mark.parametrize("charset", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_text_with_a_byte_order_mark_is_read_by_it(here: Path, charset: str) -> None:
    (here / "a.md").write_bytes("\ufeffcaf\xe9\r\n\U0001f600".encode(charset))
    assert read("a.md") == {"a.md": "caf\xe9\n\U0001f600\n"}


def test_the_digest_follows_the_text() -> None:
    assert (
        Document("a", Converted("x\n")).digest
        == Document("b", Converted("x\n")).digest
        != Document("a", Converted("y\n")).digest
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b" \n\t\n", "empty"),
        (b"caf\xe9", f"invalid UTF-8 at byte 3; {ICONV}"),
        (b"text" + b" " * 70_000 + b"\0", "binary"),
        (b"\xff\xfet", "invalid UTF-16 at byte 2"),
        (b"\xff\xfea\0\0\0", "binary"),
        (("caf\xe9 au lait, " * 99).encode("latin-1"), f"invalid UTF-8 at byte 3; {ICONV}"),
    ],
)
def test_what_is_no_text_is_skipped_with_a_reason(here: Path, data: bytes, reason: str) -> None:
    (here / "a.md").write_bytes(data)
    (here / "b.md").write_text("fine\n")
    assert read(".") == {"a.md": f"[{reason}]", "b.md": "fine\n"}


def test_control_characters_other_than_sequences_are_text(here: Path) -> None:
    (here / "a.md").write_text("bell \a escape \x1b[31m\n")
    assert read("a.md") == {"a.md": "bell \a escape \n"}


def test_links_that_lead_back_up_are_not_followed(here: Path) -> None:
    (here / "docs/sub").mkdir(parents=True)
    (here / "docs/a.md").write_text("a\n")
    (here / "docs/sub/b.md").write_text("b\n")
    (here / "docs/sub/up").symlink_to(here / "docs")
    (here / "docs/broken.md").symlink_to(here / "nowhere")
    os.mkfifo(here / "pipe")
    (here / "docs/pipe.md").symlink_to(here / "pipe")
    assert read("docs", selection=Selection(follow=True)) == {
        "docs/a.md": "a\n",
        "docs/broken.md": "[a broken link]",
        "docs/pipe.md": "[not a regular file]",
        "docs/sub/b.md": "b\n",
    }


def test_a_linked_directory_is_read_once(here: Path) -> None:
    (here / "docs").mkdir()
    (here / "other").mkdir()
    (here / "other/a.md").write_text("a\n")
    (here / "docs/one").symlink_to(here / "other")
    (here / "docs/two").symlink_to(here / "other")
    assert list(read("docs", selection=Selection(follow=True))) == ["other/a.md"]
    assert read("docs") == {"docs/one": "[a link to a folder: name it, or --follow]"}
    assert list(read("docs/two")) == ["other/a.md"]


def test_an_unreadable_file_is_skipped(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "a.md").write_text("a\n")
    (here / "b.md").write_text("b\n")
    real = Path.read_bytes  # root may read everything: refuse here
    monkeypatch.setattr(Path, "read_bytes", lambda p: refuse(p) if p.name == "b.md" else real(p))
    assert read(".") == {"a.md": "a\n", "b.md": "[unreadable: Permission denied]"}


def test_an_unreadable_directory_is_an_error_lest_its_documents_pass_for_deleted(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "docs/shut").mkdir(parents=True)
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda p: refuse(Path(p)) if p.endswith("shut") else real(p))
    with pytest.raises(UsageError, match="docs/shut"):
        read("docs")


def refuse(path: Path) -> Any:
    raise PermissionError(13, "Permission denied", str(path))


def test_a_name_that_is_no_utf8_can_be_printed(here: Path) -> None:
    try:
        Path(os.fsdecode(b"caf\xe9.md")).write_text("x\n")
    except OSError:
        pytest.skip("this file system wants UTF-8 names")
    assert list(read(".")) == ["caf\\xe9.md"]


def test_stdin_is_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped")))
    assert list(read_documents(["-"])) == [Document(place_of("-"), Converted("piped\n", "markdown"), place_of("-"))]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert list(read_documents(["-"])) == [Skipped(place_of("-"), "empty", "-", group="empty", named=True)]


def test_what_is_too_large_is_not_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (here / "sparse.md").open("wb") as sparse:
        sparse.truncate(2 << 30)
    [by_folder], [by_name] = read_documents(["."]), read_documents(["sparse.md"])
    assert isinstance(by_folder, Skipped)
    assert by_folder.reason.startswith("larger than ")
    assert isinstance(by_name, Skipped)
    assert by_name.reason == "larger than 256 MB: 2,048 MB"
    monkeypatch.setattr(documents, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a" * (2 << 20))))
    [piped] = read_documents(["-"])
    assert isinstance(piped, Skipped)
    assert piped.reason == "more than 1 MB on stdin"


def test_a_file_called_as_stdin_is_a_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "-").write_text("a file\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"stdin\n")))
    every = Selection(include=("*",))
    for path in ("./-", "."):
        [found] = read_documents([path], select=lambda path: every)
        assert isinstance(found, Document)
        assert (found.source, found.text) == (place_of("./-"), "a file\n")


def test_a_missing_path_is_found_before_anything_is_read(here: Path) -> None:
    (here / "a.md").write_text("a\n")
    with pytest.raises(NotFoundError, match="nowhere"):
        next(read_documents(["a.md", "nowhere"]))


def test_a_file_that_is_as_it_was_is_not_converted_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "a.html").write_text("<p>one</p>")
    (here / "b.html").write_text("<p>two</p>")
    known, converted = Conversions(), list[str]()
    real = documents._bytes
    monkeypatch.setattr(documents, "_bytes", lambda file: (converted.append(file.name), real(file))[1])

    def texts() -> list[str]:
        return [d.text for d in read_documents(["."], conversions=known) if isinstance(d, Document)]

    assert texts() == texts() == ["one\n", "two\n"]
    assert converted == ["a.html", "b.html"]
    (here / "a.html").write_text("<p>six</p>")
    assert texts() == ["six\n", "two\n"]
    assert converted == ["a.html", "b.html", "a.html"]


def test_the_texts_of_converted_files_are_bounded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_CHARACTERS", 10)
    known, converted = Conversions(), list[str]()
    real = documents._bytes
    monkeypatch.setattr(documents, "_bytes", lambda file: (converted.append(file.name), real(file))[1])
    for name in "abc":
        (here / f"{name}.html").write_text("<p>four</p>")
    for name in "abcbcaa":
        [found] = read_documents([f"{name}.html"], conversions=known)
        assert isinstance(found, Document)
        assert found.text == "four\n"
    assert converted == [f"{name}.html" for name in "abca"]  # two of five characters fit


def test_half_of_a_character_costs_no_document(here: Path) -> None:
    """JSON can contain half a surrogate pair, but tokenizers reject it: one such line would end the run over a
    folder."""
    (here / "a.jsonl").write_text('{"title": "\\ud83d", "text": "one \\ud800 two \\ud83d\\ude00"}\n')
    [document] = read_documents(["a.jsonl"])
    assert isinstance(document, Document)
    assert "one \ufffd two \U0001f600" in document.text
    assert document.digest
