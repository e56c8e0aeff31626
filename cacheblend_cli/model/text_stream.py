"""Streaming decode: ids to pieces of text that, joined, are one decode of all ids."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.model.tokenizer_json import is_local

_UNFINISHED = "\ufffd"


class TextStream:
    """Turn a growing list of ids into pieces of text as soon as later ids cannot change them.

    Only the ids since the last piece are decoded, together with the id before them, which absorbs a decoder's special
    treatment of the beginning of a text (such as dropping a space). Held back are:

    - one U+FFFD at the end, which later ids may complete to a character;
    - a run of byte tokens such as <0xE8>, until it ends: the decoder decodes it as a whole, and writes U+FFFD for every
      byte of a run that is not UTF-8;
    - everything, if the decoder works on the text as a whole (`is_local`).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._local = is_local(tokenizer.decoder)
        self._ids: list[int] = []  # ids not shown yet, and the id before them
        self._shown = 0  # number of characters of their text that are shown

    def push(self, token_id: int) -> str:
        """Return the text that is final with this token, "" if there is none."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._ids.append(token_id)
        if not self._local or self._tokenizer.is_byte(token_id):
            return ""
        text = self._tokenizer.decode(self._ids)
        certain = text.removesuffix(_UNFINISHED)
        piece, self._shown = certain[self._shown :], len(certain)
        if certain == text and (behind := self._tokenizer.decode([token_id])):
            self._ids, self._shown = [token_id], len(behind)
        return piece

    def held(self) -> str:
        """Return the text held back so far, as it would be shown at the end."""
        return self._tokenizer.decode(self._ids)[self._shown :]

    def flush(self) -> str:
        """Return the text held back, at the end."""
        text, self._ids, self._shown = self.held(), [], 0
        return text


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each id adds: empty if only a later one completes a character."""
    stream = TextStream(tokenizer)
    texts = [stream.push(token_id) for token_id in ids]
    if texts:
        texts[-1] += stream.flush()
    return texts
