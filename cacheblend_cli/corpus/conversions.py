"""Cache of converted files, for processes that read them repeatedly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cacheblend_cli.corpus.converters.process import ConverterProcess
from cacheblend_cli.corpus.layout import Converted

MAX_CHARACTERS = 64 << 20


class Conversions:
    """Cache of converted texts by file state: the latest ones, up to MAX_CHARACTERS in total. Plain text is not cached.

    `process` is the ConverterProcess to convert with.
    """

    def __init__(self) -> None:
        self.process = ConverterProcess()
        self._known: dict[str, tuple[tuple[int, ...], Converted]] = {}
        self._characters = 0

    def of(self, file: Path, convert: Callable[[], Converted]) -> Converted:
        """Return the cached conversion if the file is unchanged, else call `convert`."""
        try:
            found = file.stat()
        except OSError:
            return convert()
        name, state = str(file.resolve()), (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        known = self._known.get(name)
        if known is not None and known[0] == state:
            return known[1]
        converted = convert()  # a change during conversion makes `state` stale, so the entry is not used
        if not converted.layout.numbered:
            self._keep(name, state, converted)
        return converted

    def _keep(self, name: str, state: tuple[int, ...], converted: Converted) -> None:
        if name in self._known:
            self._characters -= len(self._known.pop(name)[1].text)
        self._known[name] = state, converted
        self._characters += len(converted.text)
        while self._characters > MAX_CHARACTERS:
            _, oldest = self._known.pop(next(iter(self._known)))
            self._characters -= len(oldest.text)
