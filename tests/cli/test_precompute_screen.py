"""Screen output of `precompute`: progress, names of files, and why files are skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hostile
import pytest
from cacheblend_store import ChunkStore

from cacheblend_cli.cli import output as output_module
from cacheblend_cli.cli.folders import SkippedFiles
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.precompute import _View
from cacheblend_cli.collect.events import ChunkResult, PrecomputeEvent
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine

Cli = Callable[..., Any]
ODD = ("x[/red]y.md", "a\x1b]0;pwn\x07.md", "b\u009b31m\u202e.md", "[bold]c[/bold].md")


@pytest.fixture
def screen(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Everything that a terminal with animation gets from a command. code: its expected exit code."""

    def call(*arguments: str, code: int = 0) -> str:
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr(output_module, "_REDRAW_S", 0.0)
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: True)
        result = cli(*arguments)
        assert result.code == code, result.err
        return str(result.out + result.err)

    return call


@pytest.mark.parametrize("name", ODD)
def test_a_name_neither_drives_the_terminal_nor_is_markup(screen: Callable[..., str], docs: Path, name: str) -> None:
    folder = docs / Path(name.replace("[/red]", "[/")).parent
    folder.mkdir(exist_ok=True)
    (folder / name.rpartition("/")[2]).write_text("# gamma\n\nMara keeps the harbor.\n" * 50)
    (docs / f"bad{name.replace('/', '')}").write_bytes(b"\xff\xfe\0")
    shown = {
        command[0]: screen(*command)
        for command in (
            ("precompute", "docs", "--dry-run"), ("precompute", "docs"), ("chunks", "ls"), ("search", "gamma harbor"),
            ("ask", "gamma harbor?", "--max-tokens", "1"),
        )
    }  # fmt: skip
    shown["error"] = screen("precompute", str(docs / name) + "missing", code=3)
    for command, text in shown.items():
        assert not {"\x07", "\u009b", "\u202e"} & set(text), command
        assert "\x1b]" not in text, command
    as_shown = (
        name.replace("\x1b", "\u241b").replace("\x07", "\u2407").replace("\u009b", "\ufffd").replace("\u202e", "\ufffd")
    )
    assert all(as_shown in shown[command] for command in ("precompute", "chunks", "error"))


class _Bar(Output):
    """Keeps what progress bars are told."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = list[tuple[str, int, int, str]]()

    def progress(self, description: str, *, with_eta: bool = True) -> Any:
        return nullcontext(lambda done, total, text: self.updates.append((description, done, total, text)))


def test_the_bar_counts_documents_until_the_total_is_known_and_never_goes_backwards(
    docs: Path, model: Path, tmp_path: Path
) -> None:
    for number, size in enumerate((60, 3, 40)):
        (docs / f"n{number}.md").write_text("\n\n".join(f"paragraph {i} of {number}" for i in range(size)))
    engine = Engine.load(EngineConfig(model=str(model)))
    names = sorted(str(path) for path in docs.iterdir())

    def run(paths: list[str]) -> tuple[_Bar, list[PrecomputeEvent]]:
        bar, events = _Bar(), list[PrecomputeEvent]()
        view = _View(bar, SkippedFiles(bar, verbose=False))

        def on_event(event: PrecomputeEvent) -> None:
            events.append(event)
            view.on_event(event)

        with ChunkStore.open(tmp_path / "store", mode="write") as store:
            engine.precompute(store, paths, PrecomputeOptions(chunk_tokens=40), on_event)
        return bar, events

    first, (second, events) = run(names[:2])[0], run(names)
    for bar in (first, second):
        reading = [(done, total, text) for name, done, total, text in bar.updates if name == "reading"]
        found = [(done, text) for done, total, text in reading if not total]
        assert found[0][0] == 1
        assert found[0][1].endswith("; 1 found")
        shares = [done / total for done, total, _ in reading if total]
        assert shares == sorted(shares)
        assert shares[-1] == 1
    chunks = [event.chunk for event in events if event.chunk is not None]
    assert {chunk.status for chunk in chunks} == {"new", "unchanged"}
    computed = sum(chunk.tokens for chunk in chunks if chunk.status == "new")
    worked = [(done, total) for name, done, total, _ in second.updates if name == "precompute"]
    assert worked[-1] == (computed, computed), "what was stored before is no progress, and no speed"
    assert {total for _, total in worked} == {computed}


def test_the_bar_says_the_time_left_once_it_is_known() -> None:
    bar = _Bar()
    view, chunk = _View(bar, SkippedFiles(bar, verbose=False)), ChunkResult("id", "a.md", 0, 100, 1, "new")
    view.total = 1000
    for left_s in (0.0, 90.0):
        view.on_event(PrecomputeEvent("chunk", chunk, done=100, left_s=left_s))
    unknown, known = (text for *_, text in bar.updates)
    assert not unknown
    assert known.startswith("90 s")


def test_skipped_files_have_one_hint_a_reason(cli: Cli, docs: Path) -> None:
    for name in ("a.png", "b.jpg", "c.zip", "d.xyz", "e.mp3"):
        (docs / name).write_bytes(b"\0")
    (docs / "locked.pdf").write_bytes(hostile.PDFS["locked"]())
    (docs / "README").write_text("Mara keeps the harbor.\n")
    told = cli("precompute", "docs")
    assert told.code == 0
    [line] = [line for line in told.err.splitlines() if line.startswith("skipped 6 files")]
    assert "1 .png, 1 .jpg (images have no text)" in line
    assert "1 .zip (archives are not read: unpack them)" in line
    assert "1 .mp3 (audio and video have no text)" in line
    assert "1 .xyz (name them, or --include them)" in line
    assert "1 with a password (save them without it, a PDF for example with qpdf --decrypt)" in line
    assert "docs/README#0" in cli("chunks", "ls").out


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("locked.pdf", "save it without it, a PDF for example with qpdf --decrypt"), ("c.zip", "archives are not read: unpack them"),
        ("a.png", "images have no text"), ("d.xyz", "supported: text"),
        ("e.odt", "OpenDocument texts and slides are not read: save as .docx or .pptx"),
        ("f.msg", "Outlook messages are not read: save as .eml"),
    ],
)  # fmt: skip
def test_a_named_file_that_is_not_read_has_a_hint_of_its_own(cli: Cli, docs: Path, name: str, hint: str) -> None:
    data = {"locked.pdf": hostile.PDFS["locked"](), "latin.txt": b"caf\xe9\n"}.get(name, b"\0")
    (docs / name).write_bytes(data)
    told = cli("precompute", f"docs/{name}")
    assert told.code == 2
    assert f"docs/{name} was not stored" in told.err
    assert f"hint: {hint}" in told.err


@pytest.mark.parametrize("content", [{}, {"a.png": b"\0"}, {".hidden": b"text\n"}])
def test_paths_without_a_document_fail_before_the_engine_is_imported(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, bytes]
) -> None:
    def loaded(*arguments: object) -> None:
        raise AssertionError("the engine was imported")

    monkeypatch.setattr("cacheblend_cli.cli.options.import_engine", loaded)
    (tmp_path / "empty").mkdir()
    for name, data in content.items():
        (tmp_path / "empty" / name).write_bytes(data)
    told = cli("precompute", "empty")
    assert told.code == 2
    assert "error: no document was found" in told.err
    assert "0 documents" not in told.err
    assert ("skipped 1 file: 1 .png" in told.err) == ("a.png" in content)
    assert cli("precompute", "missing").code == 3
    assert cli("precompute", "empty", "--max-size", "x").code == 2


def test_an_empty_folder_that_the_store_knows_is_brought_up_to_date(cli: Cli, docs: Path, stored: list[str]) -> None:
    for path in docs.iterdir():
        path.unlink()
    told = cli("precompute", "docs", "--yes")
    assert told.code == 0
    assert "is gone" in told.err
    assert cli("chunks", "ls", "--json").records == []
