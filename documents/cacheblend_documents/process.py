"""Convert files in a separate process with memory and CPU limits. A hostile or broken file kills that process, not the
caller.

Parsers of PDF, Office, HTML and e-mail can take hours or all memory for some files of a few kilobytes.
`ConverterProcess` sends the bytes of a file to `python -m` this module and receives the text. Only plain text is
decoded in the caller's process.
"""

from __future__ import annotations

import signal

import msgspec

from cacheblend_documents.converter import NoDocument, encodable, from_plain
from cacheblend_documents.formats import PLAIN, converter_of, named_by_content
from cacheblend_documents.layout import Converted
from cacheblend_documents.limited_process import MIB, Cancellation, LimitedProcess, ProcessEnded, limits, serve


class ConversionLimits(msgspec.Struct, frozen=True):
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
    limits: ConversionLimits
    data: bytes = b""


class _Result(msgspec.Struct):
    """Converted text, or the arguments of a NoDocument."""

    converted: Converted | None = None
    reason: str = ""
    group: str = ""
    unread: bool = False


_decode = msgspec.msgpack.Decoder(_Result).decode


class ConverterProcess:
    """Converts files in another process.

    The process starts with the first file that needs it and ends with this object.
    """

    def __init__(self, limits: ConversionLimits | None = None) -> None:
        self._limits = limits or ConversionLimits()
        self._process = LimitedProcess(__name__)

    def convert(self, name: str, data: bytes, cancellation: Cancellation | None = None) -> Converted:
        """Convert the bytes of a file. A cancellation kills the process.

        The name selects the converter; without a known suffix, the content does. Raises NoDocument, and an
        error of its own if it was cancelled.
        """
        name = named_by_content(name, data)
        converter = converter_of(name) or from_plain
        if converter in PLAIN:
            return converter(data)
        try:
            answer = self._process.ask(msgspec.msgpack.encode(_Job(name, self._limits, data)), cancellation)
        except ProcessEnded as ended:
            raise self._refusal(ended, len(data)) from None
        result = _decode(answer)
        if result.converted is None:
            raise NoDocument(result.reason, result.group, unread=result.unread)
        return result.converted

    def close(self) -> None:
        self._process.close()

    def _refusal(self, ended: ProcessEnded, size: int) -> NoDocument:
        """Return the error for a process that ended without an answer."""
        if ended.is_too_slow:
            seconds = self._limits.seconds_for(size)
            return NoDocument(
                f"takes more than {seconds:,.0f} s to convert; store its text instead", "too slow to convert"
            )
        if ended.is_step_too_slow:
            reason = "its HTML takes too long to parse: nested too deeply, or tags with too many attributes"
            return NoDocument(f"{reason}; store its text instead", "too slow to convert")
        if ended.status == -signal.SIGABRT:  # a library ends the process when there is no memory for it
            return NoDocument("damaged, or needs too much memory to convert", "damaged or locked")
        return NoDocument(f"its converter crashed ({ended}); store its text instead", "damaged or locked")


def _convert(job: _Job) -> _Result:
    """Convert within the limits."""
    memory = job.limits.memory + job.limits.memory_per_byte * len(job.data)
    converter = converter_of(job.name)
    assert converter is not None
    try:
        with limits(job.limits.seconds_for(len(job.data)), memory):
            converted = encodable(converter(job.data))
    except NoDocument as no:
        return _Result(reason=no.reason, group=no.group, unread=no.unread)
    except MemoryError:
        return _Result(reason=f"needs more than {memory // MIB:,} MiB of memory to convert", group="too large unpacked")
    except RecursionError:
        return _Result(reason="is nested too deeply", group="damaged or locked")
    except Exception:  # its message is not for users
        return _Result(reason="damaged, or not what its name says", group="damaged or locked")
    if len(converted.text) > job.limits.characters:
        most = f"{job.limits.characters / MIB:.3g} MB"
        return _Result(reason=f"has more than {most} of text", group="too large unpacked")
    return _Result(converted)


if __name__ == "__main__":
    serve(lambda message: msgspec.msgpack.encode(_convert(msgspec.msgpack.decode(message, type=_Job))))
