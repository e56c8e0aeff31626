"""Stop strings: an answer ends before them, however its text comes in pieces."""

from __future__ import annotations


class StopStrings:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held, self.hit = stops, "", False

    def push(self, piece: str) -> str:
        """The text that is safe to show. After a hit nothing more is."""
        if self.hit:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [i for s in self._stops if (i := text.find(s)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        keep = max((n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def is_in(self, piece: str) -> bool:
        """Whether pushing the piece would be a hit."""
        return any(s in self._held + piece for s in self._stops)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return "" if self.hit else held
