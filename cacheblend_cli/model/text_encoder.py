"""Encode the text of documents and questions, never as control tokens. Can be sent to another process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
import tokenizers

from cacheblend_cli.errors import TextRefused, UsageError
from cacheblend_cli.model.model_files import AGAIN

_LONG = 4096  # characters, which take a few milliseconds to encode


class TextEncoder:
    """Encodes text in the middle of a prompt."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, control: Mapping[int, str], num_embeddings: int) -> None:
        """tokenizer: without control tokens among its added tokens. control: id -> control token."""
        self._tokenizer, self._control, self._num_embeddings = tokenizer, dict(control), num_embeddings

    @classmethod
    def of_bytes(cls, data: bytes) -> TextEncoder:
        tokenizer, control, num_embeddings = msgspec.msgpack.decode(data, type=tuple[str, dict[int, str], int])
        return cls(tokenizers.Tokenizer.from_str(tokenizer), control, num_embeddings)

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode((self._tokenizer.to_str(), self._control, self._num_embeddings))

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text. Raises TextRefused for text that cannot be kept apart from a control token."""
        ids = self._ids(text)
        if self._control.keys().isdisjoint(ids):
            return ids
        # By id: some models have their control tokens in the vocabulary too.
        ids = [i for piece in self._pieces(text, ids) for i in self._ids(piece)]
        bad = next((i for i in ids if i in self._control), None)
        if bad is not None:
            raise TextRefused(
                f"the text contains {self._control[bad]!r}, which this tokenizer cannot keep apart from its control token",
                "remove it from the text, or choose another model",
            )
        return ids

    def _ids(self, text: str) -> list[int]:
        return checked_ids(self._tokenizer, text, self._num_embeddings)

    def _pieces(self, text: str, ids: list[int]) -> list[str]:
        """Cut the text after the first character of every control token found in the ids."""
        contents = {self._control[i] for i in ids if i in self._control}
        cuts = [match.start() + 1 for match in re.finditer("|".join(f"(?={re.escape(c)})" for c in contents), text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@contextmanager
def checked(refusal: Callable[[BaseException], UsageError]) -> Iterator[None]:
    """Convert an error of the tokenizers library to UsageError. It raises bare Exception and, if its Rust code panics,
    PanicException, which is not an Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise refusal(error) from error


def ids_of(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Return ids without special tokens. A long text is encoded without Python's lock, which `encode` holds."""
    with checked(lambda error: TextRefused(f"the tokenizer cannot encode this text: {error}", AGAIN)):
        if len(text) < _LONG:
            encoding = tokenizer.encode(text, add_special_tokens=False)
        else:
            [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)


def checked_ids(tokenizer: tokenizers.Tokenizer, text: str, num_embeddings: int) -> list[int]:
    """Return ids without special tokens. Raises TextRefused for an id that has no embedding."""
    ids = ids_of(tokenizer, text)
    if max(ids, default=0) >= num_embeddings:
        bad = next(i for i in ids if i >= num_embeddings)
        raise TextRefused(
            f"the token {tokenizer.id_to_token(bad)!r} has the id {bad}; the model has {num_embeddings} "
            "embeddings (vocab_size in config.json)",
            "the tokenizer and the weights belong to different models",
        )
    return ids
