"""What files were converted to, for as long as a process looks at them again and again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cacheblend_cli.corpus.layout import Converted


class Conversions:
    """Files that are as they were are not converted again. What is text already is not kept."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, ...], Converted]] = {}

    def of(self, file: Path, convert: Callable[[], Converted]) -> Converted:
        """What the file was converted to, else what `convert` makes of it."""
        try:
            found = file.stat()
        except OSError:
            return convert()
        name, state = str(file.resolve()), (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        known = self._known.get(name)
        if known is not None and known[0] == state:
            return known[1]
        converted = convert()  # a change meanwhile makes the state it is kept under an old one
        if not converted.layout.numbered:
            self._known[name] = state, converted
        return converted
