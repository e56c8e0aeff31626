"""Text of scanned PDF pages, recognised by ocrmypdf: a program that the user installs, run with limits.

It works in a temporary folder of its own, with a clean environment. PDFs are untrusted, so its processes have limits of
memory, CPU time and file size where the system can set them, and it is killed with its children when its time is up.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from cacheblend_documents.converted import SCANNED, Converted, NotConverted
from cacheblend_documents.limited_process import MIB
from cacheblend_documents.omissions import Omissions, number_ranges

PROGRAM = "ocrmypdf"
_LANGUAGES = re.compile(r"\w{1,40}(\+\w{1,40}){0,15}")
_MOST_PAGES = 10_000  # named in one command
_MESSAGE = 200  # characters to show of a message
_BAD_ARGUMENTS, _MISSING_DEPENDENCY = 1, 3
"""Exit statuses that apply to every file: an ocrmypdf that is too old, or without tesseract or a language of it."""
_SECONDS = 300  # to recognise one file
_SECONDS_PER_MIB = 120  # additional time per MiB of the file: ten to twenty pages
_MEMORY = 4 << 30  # address space of each process, bytes
_FILE_SIZE = 2 << 30  # bytes
_JOBS = 4  # processes at a time


class OcrError(Exception):
    """Text cannot be recognised in any file. hint: what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def check_languages(languages: str) -> None:
    """Raise OcrError if the languages are malformed."""
    if not _LANGUAGES.fullmatch(languages):
        raise OcrError(f"{languages!r} is not a list of OCR languages", "use tesseract's names, such as deu+eng")


def check_ocr(languages: str) -> None:
    """Raise OcrError if the program is not installed, or if the languages are malformed."""
    check_languages(languages)
    if shutil.which(PROGRAM) is None:
        message = f"OCR needs the program {PROGRAM}, which is not installed"
        raise OcrError(message, "install it with tesseract: apt install ocrmypdf, or brew install ocrmypdf")


def convert_with_ocr(convert: Callable[[bytes], Converted], data: bytes, languages: str) -> Converted:
    """Convert a PDF; if pages show only images, recognise their text and convert it again.

    Recognised text can have errors, so an omission names its pages. Raises NotConverted, and OcrError if
    ocrmypdf cannot work.
    """
    converted: Converted | None = None
    try:
        converted = convert(data)
    except NotConverted as no:
        if no.group != SCANNED:
            raise
    pages = () if converted is None else converted.scanned_pages
    if converted is not None and not pages:
        return converted
    try:
        found = convert(recognised(data, languages, pages))
    except NotConverted as no:
        if no.group == SCANNED:
            no = NotConverted("no text is recognised on its pages", "without text to recognise")
        if converted is None:
            raise NotConverted(f"a scanned PDF: {no.reason}", no.group, unread=no.unread) from no
        return _with_omission(converted, f"the text of scanned pages: {no.reason}")
    images, scanned = Omissions(), {f"page {number}" for number in pages}
    for part in dict.fromkeys(mark.part for mark in found.marks):
        if converted is None or part in scanned:
            images.add("page image", part.removeprefix("page "))
    return _with_omission(found, *(f"{text}, whose text was recognised (OCR) and can have errors" for text in images))


def _with_omission(converted: Converted, *omissions: str) -> Converted:
    return replace(converted, omissions=(*omissions, *converted.omissions))


def recognised(data: bytes, languages: str, pages: Sequence[int] = ()) -> bytes:
    """Return the PDF with the text of these pages, or of all if `pages` is empty.

    Raises NotConverted and OcrError.
    """
    check_ocr(languages)
    with TemporaryDirectory(prefix="cacheblend-ocr-") as name:  # for this user only
        folder = Path(name)
        (folder / "in.pdf").write_bytes(data)
        status = _run(_command(languages, pages), folder, _SECONDS + _SECONDS_PER_MIB * len(data) / MIB)
        if status in (_BAD_ARGUMENTS, _MISSING_DEPENDENCY):
            message = " ".join((folder / "messages").read_text(errors="replace").split())[:_MESSAGE]
            raise OcrError(
                f"{PROGRAM} cannot run: {message or f'exit status {status}'}",
                "install what is missing; for German, for example: apt install tesseract-ocr-deu",
            )
        if status:
            raise NotConverted(f"{PROGRAM} cannot read it (status {status})", "not recognised", unread=True)
        return (folder / "out.pdf").read_bytes()


def _command(languages: str, pages: Sequence[int]) -> list[str]:
    flags = ["--quiet", "--output-type", "pdf", "--optimize", "0", "--force-ocr", "--rotate-pages"]
    flags += ["--jobs", str(min(_JOBS, os.cpu_count() or 1)), "--language", languages]
    flags += ["--pages", ",".join(number_ranges(pages[:_MOST_PAGES]))] if pages else []
    return [PROGRAM, *flags, "in.pdf", "out.pdf"]


def _run(command: Sequence[str], folder: Path, seconds: float) -> int:
    """Run the program in the folder and return its exit status. Raises NotConverted if its time is up.

    Its messages go to the file `messages`. It and its children end with this function, also at an interrupt.
    """
    kept = {name: os.environ[name] for name in ("PATH", "TESSDATA_PREFIX") if name in os.environ}
    environment = {**kept, "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"}
    with (folder / "messages").open("wb") as messages:
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=null, stdout=null, stderr=messages, start_new_session=True
        )
        try:
            _limit(process.pid, seconds)
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise NotConverted(
                f"recognising its text takes more than {seconds:,.0f} s", "too slow to recognise", unread=True
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _limit(pid: int, seconds: float) -> None:
    """Limit the process and its later children. If this process is killed, the limit of CPU time ends them."""
    if not hasattr(resource, "prlimit"):  # not Linux
        return
    kinds = resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE
    for limit, most in zip(kinds, (_MEMORY, int(seconds) + 1, _FILE_SIZE), strict=True):
        with suppress(OSError, ValueError):  # it has ended, or has a lower limit
            resource.prlimit(pid, limit, (most, most))
