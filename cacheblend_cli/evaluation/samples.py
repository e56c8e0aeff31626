"""Questions with their contexts, read from JSON and JSON lines."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cacheblend_store.conversion import convert
from msgspec import Meta, Struct, ValidationError

from cacheblend_cli.errors import UsageError
from cacheblend_cli.text_files import read_text

_HINT = 'a sample is {"question", "answers"?, "ctxs"?: [{"title"?, "text"}]} or {"0", ..., "chunk_num", "query"}'
_SPACE, _IN_A_LIST = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*")
_Text = Annotated[str, Meta(pattern=r"\S")]
_Answers = list[str | list[str]] | None


@dataclass(frozen=True)
class Context:
    """One chunk of a prompt. before: the texts before it in its page, in order (its left context)."""

    text: str
    title: str = ""
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A question, its reference answers (none: only fidelity to full prefill is measured), and its chunks in prompt
    order.

    contexts: () to search the store. tags: other fields of the record.
    """

    question: str
    answers: tuple[str, ...]
    contexts: tuple[Context, ...]
    tags: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Digest of everything but the tags, 128 bits in hex."""
        identity = [self.question, self.answers, [(c.text, c.title, c.before) for c in self.contexts]]
        return hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()


class _Passage(Struct):
    text: _Text
    title: str | None = None


class _Row(Struct):
    question: _Text
    answers: _Answers = None
    ctxs: Annotated[list[_Passage], Meta(min_length=1)] = []


class _Numbered(Struct):
    """Sample whose texts are in fields "0", "1" and so on."""

    query: _Text
    chunk_num: Annotated[int, Meta(ge=1)]
    answers: _Answers = None


def pages(titles: Sequence[str], texts: Sequence[str]) -> tuple[Context, ...]:
    """Return contexts in which adjacent texts of the same title are chunks of one page. A text without a title is its
    own page."""
    out: list[Context] = []
    for title, text in zip(titles, texts, strict=True):
        follows = title and out and out[-1].title == title
        out.append(Context(text, title, (*out[-1].before, out[-1].text) if follows else ()))
    return tuple(out)


def read_samples(path: Path, limit: int | None = None) -> list[Sample]:
    """Read a JSON list of samples, or JSON values one after another (JSON lines, or a single object). Raises
    NotFoundError without the file, UsageError with file and line for a malformed sample."""
    return parse_samples(read_text(path), str(path), limit)


def parse_samples(text: str, name: str, limit: int | None = None) -> list[Sample]:
    """Parse samples from text. name: the file's name in errors."""
    samples: list[Sample] = []
    for value, line in _values(text, name):
        if limit is not None and len(samples) >= limit:
            break
        samples.append(_sample(value, f"{name}:{line}"))
    if not samples and limit != 0:
        raise UsageError(f"{name} has no samples", _HINT)
    return samples


def _values(text: str, name: str) -> Iterator[tuple[Any, int]]:
    """Yield each value of a list, or of a stream of values, with its first line."""
    decoder, listed = json.JSONDecoder(), text.lstrip().startswith("[")
    at, last = (text.index("[") + 1, text.rfind("]")) if listed else (0, len(text))
    number = 1 + text.count("\n", 0, at)
    try:
        if listed:
            json.loads(text)  # checks the text between the values, too
        while True:
            between = (_IN_A_LIST if listed else _SPACE).match(text, at)
            assert between is not None
            number += text.count("\n", at, between.end())
            if between.end() >= last:
                return
            value, at = decoder.raw_decode(text, between.end())
            yield value, number
            number += text.count("\n", between.end(), at)
    except ValueError as error:
        where = getattr(error, "lineno", number)
        raise UsageError(f"{name}:{where} is not JSON: {getattr(error, 'msg', error)}", _HINT) from error


def _sample(value: Any, place: str) -> Sample:
    """Raises UsageError, which names the field."""
    try:
        if isinstance(value, dict) and "chunk_num" in value:  # chunks from anywhere, each a page of its own
            numbered = convert(value, _Numbered)
            names = [str(i) for i in range(min(numbered.chunk_num, len(value)))]
            missing = next((name for name in names if name not in value), None)
            if missing is not None:
                raise UsageError(
                    f'{place} is not a sample: it has no text "{missing}", and chunk_num is {numbered.chunk_num}', _HINT
                )
            texts = convert([value[name] for name in names], list[_Text])
            return Sample(numbered.query.strip(), _flat(numbered.answers), tuple(map(Context, texts)))
        row = convert(value, _Row)
    except ValidationError as error:
        raise UsageError(f"{place} is not a sample: {error}", _HINT) from error
    contexts = pages([c.title or "" for c in row.ctxs], [c.text for c in row.ctxs])
    tags = {name: field for name, field in value.items() if name not in _Row.__struct_fields__}
    return Sample(row.question.strip(), _flat(row.answers), contexts, tags)


def _flat(answers: _Answers) -> tuple[str, ...]:
    """Return the answers of a list, or list of lists, of texts; () without answers."""
    return tuple(text for answer in answers or () for text in (answer if isinstance(answer, list) else [answer]))
