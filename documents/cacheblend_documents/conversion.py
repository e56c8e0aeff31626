"""Convert files to text: those of parsed formats in a process of their own, with limits of memory and CPU time.

Parsers of PDF, Office, HTML and e-mail can take hours or all memory for some files of a few kilobytes. A hostile or
broken file kills that process, not the caller. Only plain text is decoded in the caller's process.
"""

from __future__ import annotations

import re
import signal
from dataclasses import replace

import msgspec

from cacheblend_documents.converted import Converted, NotConverted, refusing_damage
from cacheblend_documents.formats import TEXT, format_of, named_by_content
from cacheblend_documents.limited_process import MIB, Cancellation, LimitedProcess, ProcessEnded, limits, serve
from cacheblend_documents.ocr import convert_with_ocr

_HALF = re.compile("[\ud800-\udfff]")


class Limits(msgspec.Struct, frozen=True):
    """Limits for converting one file."""

    seconds: float = 120  # CPU time
    seconds_per_mib: float = 10  # additional CPU time per MiB of the file
    memory: int = 1 << 30  # address space, bytes
    memory_per_byte: int = 8  # additional address space per byte of the file
    characters: int = 64 * MIB  # maximum length of the converted text

    def seconds_for(self, size: int) -> float:
        return self.seconds + self.seconds_per_mib * size / MIB


class _Job(msgspec.Struct):
    name: str
    limits: Limits
    data: bytes = b""


class _Result(msgspec.Struct):
    """Converted text, or the arguments of a NotConverted."""

    converted: Converted | None = None
    reason: str = ""
    group: str = ""
    unread: bool = False


_decode = msgspec.msgpack.Decoder(_Result).decode


def converter_process() -> LimitedProcess:
    """Return a process for many conversions. It starts with the first file that needs it, and ends with the object."""
    return LimitedProcess(__name__)


def convert(
    name: str,
    data: bytes,
    limits: Limits | None = None,
    *,
    ocr: str = "",
    process: LimitedProcess | None = None,
    cancellation: Cancellation | None = None,
) -> Converted:
    """Return the text of a file. It ends with a line end.

    name: its suffix selects the converter; without a known suffix the content does, and is text by default.
    ocr: languages in which to recognise scanned pages of a PDF, as tesseract names them: "deu+eng".
    process: a `converter_process` to convert in; by default one of the file's own.
    cancellation: kills the process if another thread cancels.
    Raises NotConverted if there is no text or it cannot be read, and OcrError if OCR does not work at all.
    """
    limits = limits or Limits()
    name = named_by_content(name, data)
    if (format_of(name) or TEXT).is_plain:
        return convert_here(name, data)
    own = process or converter_process()
    try:
        if ocr and name.lower().endswith(".pdf"):
            return convert_with_ocr(lambda pdf: _parsed(name, pdf, limits, own, cancellation), data, ocr)
        return _parsed(name, data, limits, own, cancellation)
    finally:
        if process is None:
            own.close()


def _parsed(
    name: str, data: bytes, limits: Limits, process: LimitedProcess, cancellation: Cancellation | None
) -> Converted:
    """Convert a file in the process."""
    job = _Job(name.encode(errors="replace").decode(), limits, data)  # names need not be UTF-8
    try:
        answer = process.ask(msgspec.msgpack.encode(job), cancellation)
    except ProcessEnded as ended:
        raise _refusal(ended, limits.seconds_for(len(data))) from None
    try:
        result = _decode(answer)
    except msgspec.ValidationError as error:
        raise NotConverted(f"its converter is wrong: {error}", "damaged or locked") from None
    if result.converted is None:
        raise NotConverted(result.reason, result.group, unread=result.unread)
    return result.converted


def _refusal(ended: ProcessEnded, seconds: float) -> NotConverted:
    """Return the error for a process that ended without an answer."""
    if ended.is_too_slow:
        return NotConverted(
            f"takes more than {seconds:,.0f} s to convert; store its text instead", "too slow to convert"
        )
    if ended.is_step_too_slow:
        reason = "its HTML takes too long to parse: nested too deeply, or tags with too many attributes"
        return NotConverted(f"{reason}; store its text instead", "too slow to convert")
    if ended.status == -signal.SIGABRT:  # a library ends the process when there is no memory for it
        return NotConverted("damaged, or needs too much memory to convert", "damaged or locked")
    return NotConverted(f"its converter crashed ({ended}); store its text instead", "damaged or locked")


def _result(job: _Job) -> _Result:
    """Convert within the limits, in the process."""
    memory = job.limits.memory + job.limits.memory_per_byte * len(job.data)
    try:
        with limits(job.limits.seconds_for(len(job.data)), memory):
            converted = convert_here(job.name, job.data)
        if len(converted.text) > job.limits.characters:
            raise NotConverted(f"has more than {job.limits.characters / MIB:.3g} MB of text", "too large unpacked")
    except NotConverted as no:
        return _Result(reason=no.reason, group=no.group, unread=no.unread)
    except MemoryError:
        return _Result(reason=f"needs more than {memory // MIB:,} MiB of memory to convert", group="too large unpacked")
    return _Result(converted)


def convert_here(name: str, data: bytes) -> Converted:
    """Convert a file in this process, without limits. Raises NotConverted and MemoryError."""
    with refusing_damage():
        converted = (format_of(name) or TEXT).load()(data)
    if not converted.text.strip():
        lost = "; ".join(converted.omissions)
        raise NotConverted(f"no text; left out: {lost}" if lost else "empty", "without text" if lost else "empty")
    _check_marks(converted)
    return _encodable(converted)


def _check_marks(converted: Converted) -> None:
    """Raise NotConverted for marks outside of the text or not in order, and for text before the first part."""
    starts = [0, *(mark.start for mark in converted.marks), len(converted.text)]
    if starts != sorted(starts) or (converted.is_split and starts[1] != 0):
        raise NotConverted("its converter is wrong: marks are not in the text, or not in order", "damaged or locked")


def _encodable(converted: Converted) -> Converted:
    """Replace lone surrogates, which can occur in JSON but not in UTF-8, and end the text with a line end."""
    marks = tuple(replace(mark, part=_HALF.sub("\ufffd", mark.part)) for mark in converted.marks)
    text, title, *omissions = (
        _HALF.sub("\ufffd", text) for text in (converted.text, converted.title, *converted.omissions)
    )
    text += "\n" * (not text.endswith("\n"))
    return replace(converted, text=text, marks=marks, title=title, omissions=tuple(omissions))


if __name__ == "__main__":
    serve(lambda message: msgspec.msgpack.encode(_result(msgspec.msgpack.decode(message, type=_Job))))
