"""`precompute --ocr`: scanned pages are recognised by an installed program, and their text says so."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheblend_documents.converted import NotConverted
from cacheblend_documents.ocr import recognised
from fake_ocr import FakeOcr, scanned_pdf
from files import pdf, write

from cacheblend_cli.cli import options
from cacheblend_cli.corpus import documents

Cli = Callable[..., Any]
SCAN, READ = scanned_pdf(["", ""]), pdf(["Mara leads billing.", "Jonas keeps a parrot."])
IMAGES = "2 page images (1, 2), whose text was recognised (OCR) and can have errors"
IMAGE = "1 page image (2), whose text was recognised (OCR) and can have errors"


@pytest.fixture
def ocr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeOcr:
    fake = FakeOcr(tmp_path / "bin")
    fake.write(READ)
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
    return fake


def texts(cli: Cli) -> dict[str, str]:
    """Name of each stored document -> beginning of its text."""
    records = cli("chunks", "ls", "--json").records
    return {record["source"]: cli("chunks", "show", record["id"], "--json").records[0]["text"] for record in records}


def test_a_scanned_document_is_recognised_once_and_says_so(
    cli: Cli, docs: Path, ocr: FakeOcr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_RACY_NS", 0)
    write(docs / "scan.pdf", SCAN)
    first = cli("precompute", "docs")
    assert "1 scanned PDFs (read them with --ocr)" in first.err
    assert ocr.calls == []
    result = cli("precompute", "docs", "--ocr")
    assert f"warning: docs/scan.pdf: left out: {IMAGES}" in result.err
    assert texts(cli)["docs/scan.pdf"].split("\n\n") == ["Mara leads billing.", "Jonas keeps a parrot.", ""]
    assert len(ocr.calls) == 1
    for arguments in (("docs",), ()):  # remembered with the path, and read from the state
        assert "scan.pdf" not in cli("precompute", *arguments).err
    assert len(ocr.calls) == 1
    os.utime(docs / "scan.pdf")
    assert cli("precompute").code == 0
    assert len(ocr.calls) == 2
    assert "1 scanned PDFs" in cli("precompute", "docs", "--no-ocr").err
    assert "docs/scan.pdf" in texts(cli), "what was recognised stays"


def test_only_the_scanned_pages_of_a_document_are_recognised(
    cli: Cli, docs: Path, ocr: FakeOcr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "4711")
    write(docs / "half.pdf", scanned_pdf(["Mara leads billing.", ""]))
    write(docs / "full.pdf", pdf(["Ada works in Oslo."]))
    assert cli("precompute", "docs").code == 0
    assert f"docs/half.pdf: left out: {IMAGE}" in cli("precompute", "docs", "--ocr", "--ocr-languages", "deu+eng").err
    [call] = ocr.calls
    flags = " ".join(call["arguments"])
    for expected in ("--pages 2 ", "--language deu+eng ", "--force-ocr ", "in.pdf out.pdf"):
        assert expected in flags
    assert call["mode"] == 0o700
    assert not Path(call["folder"]).exists()
    assert "SECRET" not in call["environment"]
    assert call["environment"]["HOME"] == call["folder"]
    assert texts(cli)["docs/half.pdf"].startswith("Mara leads billing.")


def test_without_the_program_it_is_refused_before_the_model_is_loaded(
    cli: Cli, docs: Path, ocr: FakeOcr, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(docs / "scan.pdf", SCAN)
    assert cli("precompute", "docs", "--ocr").code == 0
    (ocr.folder / "ocrmypdf").unlink()
    monkeypatch.setenv("PATH", str(ocr.folder))
    later = cli("precompute")  # as the store remembers
    assert later.code == 2
    assert "docs/scan.pdf" in texts(cli)
    monkeypatch.setattr(options, "load_engine", lambda *given: pytest.fail("the model is loaded"))
    refused = cli("precompute", "docs", "--ocr")
    assert refused.code == 2
    assert "needs the program ocrmypdf, which is not installed" in refused.err
    assert "apt install ocrmypdf" in refused.err
    for arguments in (("--ocr", "--ocr-languages=-x"), ("--ocr", "--ocr-languages", "a b"), ("--ocr-languages", "deu")):
        assert cli("precompute", "docs", *arguments).code == 2


def test_a_failure_keeps_what_is_stored_and_what_is_read(cli: Cli, docs: Path, ocr: FakeOcr) -> None:
    write(docs / "scan.pdf", SCAN)
    assert cli("precompute", "docs", "--ocr").code == 0
    ocr.write(READ, "sys.exit(7)")
    os.utime(docs / "scan.pdf")
    write(docs / "half.pdf", scanned_pdf(["Ada works in Oslo.", ""]))
    failed = cli("precompute", "docs")
    assert "skipped docs/scan.pdf: a scanned PDF: ocrmypdf cannot read it (status 7)" in failed.err
    assert "docs/half.pdf: left out: the text of scanned pages: ocrmypdf cannot read it (status 7)" in failed.err
    assert texts(cli)["docs/half.pdf"].startswith("Ada works in Oslo.")
    assert texts(cli)["docs/scan.pdf"].startswith("Mara leads billing.")
    ocr.write(SCAN)
    os.utime(docs / "scan.pdf")
    assert "a scanned PDF: no text is recognised on its pages" in cli("precompute", "docs").err


def test_a_missing_language_ends_the_run(cli: Cli, docs: Path, ocr: FakeOcr) -> None:
    write(docs / "scan.pdf", SCAN)
    ocr.write(READ, "print('no language data:\\n deu', file=sys.stderr); sys.exit(3)")
    result = cli("precompute", "docs", "--ocr")
    assert result.code == 2
    assert "ocrmypdf cannot run: no language data: deu" in result.err


@pytest.mark.parametrize("ending", [subprocess.TimeoutExpired("ocrmypdf", 1), KeyboardInterrupt()])
def test_the_program_ends_with_its_children(
    ocr: FakeOcr, monkeypatch: pytest.MonkeyPatch, ending: BaseException
) -> None:
    fifo, wait = ocr.folder / "fifo", subprocess.Popen.wait
    os.mkfifo(fifo)
    ocr.write(READ, f"out = open({str(fifo)!r}, 'w'); os.fork(); print('x', file=out, flush=True)\nwhile True: pass")
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)

    def end(process: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        with fifo.open() as started:
            assert [started.readline() for _ in range(2)] == ["x\n", "x\n"]
        raise ending

    monkeypatch.setattr(subprocess.Popen, "wait", end)
    with pytest.raises(NotConverted if isinstance(ending, Exception) else KeyboardInterrupt) as raised:
        recognised(SCAN, "eng")
    monkeypatch.undo()
    assert os.read(reader, 1) == b"", "no process is left that has it open"
    os.close(reader)
    assert not Path(ocr.calls[0]["folder"]).exists()
    if isinstance(raised.value, NotConverted):
        assert raised.value.unread
        assert raised.value.reason == "recognising its text takes more than 300 s"


def test_real_recognition(cli: Cli, docs: Path) -> None:
    if shutil.which("ocrmypdf") is None:
        pytest.skip("ocrmypdf is not installed")
    pdfium, image = pytest.importorskip("pypdfium2"), pytest.importorskip("PIL.Image")
    pages = [page.render(scale=2).to_pil() for page in pdfium.PdfDocument(pdf(["Mara leads billing in Bergen."]))]
    assert image.Image is type(pages[0])
    pages[0].save(docs / "scan.pdf", resolution=144)
    assert cli("precompute", "docs", "--ocr").code == 0
    assert texts(cli)["docs/scan.pdf"].strip() == "Mara leads billing in Bergen."
