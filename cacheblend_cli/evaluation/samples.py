"""Questions with their contexts, read from JSON and JSON lines."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.text_files import read_text

_HINT = 'a sample is {"question", "answers"?, "ctxs"?: [{"title"?, "text"}]} or {"0", ..., "chunk_num", "query"}'
_SPACE, _IN_A_LIST = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*")


@dataclass(frozen=True)
class Context:
    """One chunk of a prompt. before: the texts before it in its page, in order (its left context)."""

    text: str
    title: str = ""
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A question, its reference answers (none: only fidelity to full prefill is measured), and its chunks in prompt order.

    contexts: () if they are to be searched in the store. tags: other fields of the record.
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


def pages(titles: Sequence[str], texts: Sequence[str]) -> tuple[Context, ...]:
    """Return contexts in which adjacent texts of the same title are chunks of one page. A text without a title is its own page."""
    out: list[Context] = []
    for title, text in zip(titles, texts, strict=True):
        follows = title and out and out[-1].title == title
        out.append(Context(text, title, (*out[-1].before, out[-1].text) if follows else ()))
    return tuple(out)


def read_samples(path: Path, limit: int | None = None) -> list[Sample]:
    """Read a JSON list of samples, or JSON values one after another (JSON lines, or a single object).

    Raises NotFoundError without the file, UsageError with file and line for a malformed sample.
    """
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


def _sample(row: Any, place: str) -> Sample:
    if not isinstance(row, dict):
        raise UsageError(f"{place} is not a JSON object", _HINT)
    if "chunk_num" in row:
        return _numbered(row, place)
    question = _question(row, "question", place)
    ctxs = row.get("ctxs", [])
    if not isinstance(ctxs, list) or ("ctxs" in row and not ctxs):
        raise UsageError(f"{place} has ctxs that are not a list of at least one context", _HINT)
    titles, texts = [], []
    for i, ctx in enumerate(ctxs):
        text = ctx.get("text") if isinstance(ctx, dict) else None
        title = ctx.get("title") if isinstance(ctx, dict) else None
        if not isinstance(text, str) or not text.strip() or not isinstance(title, str | None):
            raise UsageError(f"{place} has a context without a text: number {i + 1} of ctxs", _HINT)
        titles.append(title or "")
        texts.append(text)
    tags = {k: v for k, v in row.items() if k not in ("question", "answers", "ctxs")}
    return Sample(question, _answers(row, place), pages(titles, texts), tags)


def _numbered(row: dict[str, Any], place: str) -> Sample:
    """Read {"0": text, ..., "chunk_num": n, "query": text}: chunks from anywhere, each a page of its own."""
    count = row["chunk_num"]
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"{place} has a chunk_num that is not a positive integer", _HINT)
    texts = [row.get(str(i)) for i in range(count)]
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f'{place} has no text "{i}", and chunk_num is {count}', _HINT)
    contexts = tuple(Context(str(text)) for text in texts)
    return Sample(_question(row, "query", place), _answers(row, place), contexts)


def _question(row: dict[str, Any], name: str, place: str) -> str:
    question = row.get(name)
    if not isinstance(question, str) or not question.strip():
        raise UsageError(f"{place} has no {name}", _HINT)
    return question.strip()


def _answers(row: dict[str, Any], place: str) -> tuple[str, ...]:
    """Return the answers of a list, or list of lists, of texts; () without answers."""
    answers = row.get("answers")
    if answers is None:
        return ()
    found: list[Any] = []
    for answer in answers if isinstance(answers, list) else [None]:
        found += answer if isinstance(answer, list) else [answer]
    if not all(isinstance(answer, str) for answer in found):
        raise UsageError(f"{place} has answers that are not a list of texts", _HINT)
    return tuple(found)
