"""Passages that a client has put into its messages, found by their tags: each becomes a document of the request.

Known are `<source id="1" name="a.md">text</source>` (Open WebUI), `<document title="...">text</document>`, and
documents with the parts <source> (its title) and <document_content> (its text). Tags that are nested or not closed stay
text, with the whole message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cacheblend_cli.server.bodies import MAX_DOCUMENTS, AskBody, DocumentIn, Message
from cacheblend_cli.server.state import ServerState

_TAG = re.compile(r"<(/?)(document|source)(?![\w-])([^<>]{0,4096})>")
_ATTRIBUTE = re.compile(r"""(?<![\w-])([\w-]++)\s*+=\s*+(?:"([^"]*+)"|'([^']*+)')""")
_PARTS = [re.compile(rf"<{name}>([^<]*)</{name}>") for name in ("source", "title")]
_CONTENT = ("<document_content>", "</document_content>")
_MOST_ID, _MOST_TITLE = 256, 1024  # characters, as of a request's documents
_BLANK = re.compile(r"\s*+")


@dataclass(frozen=True)
class Element:
    """A passage in a text. start, end: of the whole element; inner: of what is taken out of it."""

    start: int
    end: int
    inner: tuple[int, int]
    id: str
    title: str


@dataclass(frozen=True)
class Passage:
    """A passage that was found. message: index of its message. characters: of its text."""

    id: str
    title: str
    message: int
    characters: int


@dataclass(frozen=True)
class Sorted:
    """Messages without their passages. passages: None if not looked for. alone: they are the request's only chunks."""

    messages: Sequence[Message]
    passages: list[Passage] | None = None
    alone: bool = False


def with_passages(host: ServerState, body: AskBody, messages: Sequence[Message]) -> Sorted:
    """Move the passages of system and user messages to the body's documents, behind those it has.

    In a user's message an element stays where it is, without its text. Those of a system message are taken out, with
    the white space between two of them, and stand without their text before the question: so the system prompt, behind
    which KV is computed, is the same whatever was retrieved. Raises PromptTooLong.
    """
    if not host.find_passages:
        return Sorted(messages)
    texts = [_text(message) for message in messages]
    host.engine.check_characters(sum(map(len, texts)))
    left, documents, found, moved = list(messages), list(body.documents or ()), list[Passage](), list[str]()
    for i, (message, text) in enumerate(zip(messages, texts, strict=True)):
        elements = elements_of(text) if message.role in ("system", "developer", "user") else []
        if not elements or len(documents) + len(elements) > MAX_DOCUMENTS:
            continue
        for element in elements:
            passage = text[slice(*element.inner)].strip()
            name = element.id or str(len(documents) + 1)
            documents.append(DocumentIn(passage, name, element.title or None))
            found.append(Passage(name, element.title, i, len(passage)))
        if message.role == "user":
            rest = _cut(text, [element.inner for element in elements])
        else:
            rest = _cut(text, _runs(text, elements))
            moved += [text[e.start : e.inner[0]] + text[e.inner[1] : e.end] for e in elements]
        left[i] = msgspec.structs.replace(message, content=rest)
    if moved:
        left[-1] = msgspec.structs.replace(left[-1], content="\n".join([*moved, "", _text(left[-1])]))
    alone = bool(found) and not body.wants_chunks
    body.documents = documents or None
    return Sorted(left, found, alone)


def elements_of(text: str) -> list[Element]:
    """The passages of a text, in order; none where its tags do not alternate. A passage without a word is text."""
    elements, opened = list[Element](), None
    for tag in _TAG.finditer(text):
        closing, kind, attributes = tag.groups()
        if opened is not None and opened[2] != kind:
            continue  # a part of a document, or a word in it
        if attributes.endswith("/"):
            continue  # an element without a text
        if bool(closing) != (opened is not None):
            return []
        if opened is None:
            opened = tag
            continue
        if text[opened.end() : tag.start()].strip():
            elements.append(_element(text, opened, tag))
        opened = None
    return elements if opened is None else []


def _element(text: str, opened: re.Match[str], closed: re.Match[str]) -> Element:
    given = {name: double or single for name, double, single in _ATTRIBUTE.findall(opened[3])}
    start, end = opened.end(), closed.start()
    title = given.get("title") or given.get("name") or ""
    if opened[2] == "document":
        before, after = text.find(_CONTENT[0], start, end), text.rfind(_CONTENT[1], start, end)
        if before >= 0 and text[before + len(_CONTENT[0]) : max(0, after)].strip():
            parts = (found[1].strip() for part in _PARTS if (found := part.search(text, start, before)))
            title, start, end = title or next(parts, ""), before + len(_CONTENT[0]), after
    name = given.get("id") or given.get("index") or ""
    return Element(opened.start(), closed.end(), (start, end), name[:_MOST_ID], title[:_MOST_TITLE])


def _runs(text: str, elements: Sequence[Element]) -> list[tuple[int, int]]:
    """Elements as one place each, with the white space up to the next one."""
    runs = []
    for element, following in zip(elements, [*elements[1:], None], strict=True):
        blank = _BLANK.match(text, element.end)
        joined = following is not None and blank is not None and blank.end() == following.start
        runs.append((element.start, following.start if joined and following else element.end))
    return runs


def _cut(text: str, places: Sequence[tuple[int, int]]) -> str:
    """The text without those places, which do not overlap."""
    ends = [0, *(end for _, end in places)]
    starts = [*(start for start, _ in places), len(text)]
    return "".join(text[end:start] for end, start in zip(ends, starts, strict=True))


def _text(message: Message) -> str:
    content = message.content
    return "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
