"""Extract passages that a client put into its messages: each tagged element becomes a document of the request.

Recognised: `<source id="1" name="a.md">text</source>` (Open WebUI), `<document title="...">text</document>`, and
documents with the parts <source> (title) and <document_content> (text). Tags that prose only mentions, as in "cite the
<source> tag", are not passages. A message with nested elements is left unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cacheblend_cli.server.bodies import MAX_DOCUMENTS, AskBody, DocumentIn, Message
from cacheblend_cli.server.server_state import ServerState

# The attributes end at the first quote before a ">": names can contain quotes and ">".
_TAG = re.compile(r"""<(/?)(document|source)(?![\w-])([^<>"']{0,512}(?:["'][^<]{0,4096}?["']\s{0,8}/?)?)>""")
_ATTRIBUTE = re.compile(r"""(?<!\S)([\w-]++)\s*+=\s*+(["'])""")
_NAMES = ("id", "index", "title", "name")
_VOID = ("src", "srcset")  # attributes of HTML's own <source>, which has no end tag
_PARTS = [re.compile(rf"<{name}>([^<]*)</{name}>") for name in ("source", "title")]
_CONTENT = ("<document_content>", "</document_content>")
_MOST_ID, _MOST_TITLE = 256, 1024  # characters, as for documents of a request
_BLANK = re.compile(r"\s*+")


@dataclass(frozen=True)
class Element:
    """A tagged passage in a text. Positions are in characters."""

    start: int
    end: int
    inner: tuple[int, int]  # start and end of the passage's text
    id: str
    title: str


@dataclass(frozen=True)
class MessagePassage:
    """A passage that was found in a message."""

    id: str  # id in its tag
    title: str  # title in its tag
    message: int  # index in `messages`
    characters: int  # length of the text


def extract_passages(
    state: ServerState, body: AskBody, messages: Sequence[Message]
) -> tuple[list[Message], list[MessagePassage]]:
    """Append the passages of system and user messages to the body's documents. Return the messages without them.

    In a user message an element stays in place without its text. Elements of a system message are moved before the
    question without their text, and white space between them is dropped: so the system prompt, the prefix of stored KV,
    does not depend on the retrieved passages. Raises PromptTooLong.
    """
    state.engine.prompts.check_characters(sum(map(num_characters, messages)), 1)
    texts = [message.text or "" for message in messages]
    left, documents, found, moved = list(messages), body.given_documents, list[MessagePassage](), list[str]()
    for i, (message, text) in enumerate(zip(messages, texts, strict=True)):
        elements = elements_of(text) if message.role in ("system", "developer", "user") else []
        if not elements or len(documents) + len(elements) > MAX_DOCUMENTS:
            continue
        for element in elements:
            passage = text[slice(*element.inner)].strip()
            name = element.id or str(len(documents) + 1)
            documents.append(DocumentIn(passage, name, element.title or None))
            found.append(MessagePassage(name, element.title, i, len(passage)))
        if message.role == "user":
            rest = _cut(text, [element.inner for element in elements])
        else:
            rest = _cut(text, _runs(text, elements))
            moved += [text[e.start : e.inner[0]] + text[e.inner[1] : e.end] for e in elements]
        left[i] = msgspec.structs.replace(message, content=rest)
    if moved:
        left[-1] = msgspec.structs.replace(left[-1], content="\n".join([*moved, "", left[-1].text or ""]))
    body.documents = [*documents] or None
    return left, found


def elements_of(text: str) -> list[Element]:
    """Return the passages of a text in order, none if its elements are nested. A blank element is not a passage."""
    elements, opened = list[Element](), None
    given: dict[str, str] = {}
    for tag in _TAG.finditer(text):
        closing, kind, attributes = tag.groups()
        if attributes.endswith("/"):
            continue  # an element without text
        if not closing:
            own = _attributes(attributes)
            if not own.keys() & set(_VOID) and _begins(kind, own, opened, given):
                opened, given = tag, own
        elif opened is None:
            return []
        elif opened[2] == kind:
            if text[opened.end() : tag.start()].strip():
                elements.append(_element(text, opened, tag, given))
            opened = None
    return elements


def _begins(kind: str, own: dict[str, str], opened: re.Match[str] | None, given: dict[str, str]) -> bool:
    """Return whether a tag begins an element (the tag opened before it is then only a mention), or belongs to the open
    element."""
    if opened is None:
        return True
    is_named, was_named = (bool(names.keys() & set(_NAMES)) for names in (own, given))
    return is_named or not was_named if opened[2] == kind else is_named and not was_named


def _attributes(text: str) -> dict[str, str]:
    """Return the attributes of a tag. A value ends at the last quote before the next attribute."""
    begins = list(_ATTRIBUTE.finditer(text))
    ends = [*(begin.start() for begin in begins[1:]), len(text)]
    found: dict[str, str] = {}
    for begin, end in zip(begins, ends, strict=False):
        value = text[begin.end() : end]
        found.setdefault(begin[1], value[: max(value.rfind(begin[2]), 0)])
    return found


def _element(text: str, opened: re.Match[str], closed: re.Match[str], given: dict[str, str]) -> Element:
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
    """Return the range of each element, including white space up to the next one."""
    runs = []
    for element, following in zip(elements, [*elements[1:], None], strict=True):
        blank = _BLANK.match(text, element.end)
        joined = following is not None and blank is not None and blank.end() == following.start
        runs.append((element.start, following.start if joined and following else element.end))
    return runs


def _cut(text: str, places: Sequence[tuple[int, int]]) -> str:
    """Return the text without these ranges, which do not overlap."""
    ends = [0, *(end for _, end in places)]
    starts = [*(start for start, _ in places), len(text)]
    return "".join(text[end:start] for end, start in zip(ends, starts, strict=True))


def num_characters(message: Message) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
