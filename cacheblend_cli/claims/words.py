"""Wording of a text: in a form to compare by, with every character in its place; its names and quotations."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d"
_QUOTES = "\u2018\u2019\u201a\u201b\u2032\u02bc\uff07"
CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Letters without capitals and spaces between words, for a character class of a regular expression."""
_CJK = re.compile(f"[{CJK}]")


class _Folded(dict[int, str]):
    """Code point -> the one character that it is compared by."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        folded = unicodedata.normalize("NFKC", char).casefold()
        if char in _DASHES:
            folded = "-"
        elif char in _QUOTES:
            folded = "'"
        elif char.isspace() and char != "\n":
            folded = " "
        self[code] = folded if len(folded) == 1 else char.lower() if len(char.lower()) == 1 else char
        return self[code]


_FOLDED = _Folded()
_BROKEN = re.compile(r"(?<=[^\W\d_])-\n[ ]*+(?=[^\W\d_])")
WORD = re.compile(r"\w++")


def folded(text: str) -> str:
    """Return the text in lower case, with digits, spaces, dashes and apostrophes of one kind, of the same length."""
    return text.translate(_FOLDED)


def words(text: str) -> list[str]:
    """Return the words of a folded text. Words that were divided at the end of a line are whole."""
    return WORD.findall(_BROKEN.sub("", text) if "-\n" in text else text)


def is_cjk(char: str) -> bool:
    """Return whether a character is a letter of CJK."""
    return _CJK.match(char) is not None


def unaccented(text: str) -> str:
    """Return the text without accents and other marks on letters."""
    return "".join(char for char in unicodedata.normalize("NFD", text) if not unicodedata.combining(char))


_QUOTED = re.compile(
    r'"([^"\n]{3,400}+)"(?!\s{0,2}:)|“([^“”\n]{2,400}+)”|„([^„“”\n]{3,400}+)[“”]|«([^«»\n]{3,400}+)»|「([^「」\n]{2,400}+)」|`([^`\n]{3,400}+)`'
)  # a text in quotes before a colon is a key or a label


def quotes(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of quoted texts of up to 400 characters, without the marks."""
    for found in _QUOTED.finditer(text):
        yield found.span(found.lastindex or 0)


_NAME_WORD = re.compile(r"[^\W\d_]++(?:['\u2019\-\u2011][^\W\d_]++)*+")
_APOSTROPHE = re.compile("['\u2019]")
_BEGINS = re.compile(r"[.!?:;…\n|>#*•(\[\"“„«`/]")
_HEADING = re.compile(r"^[ ]{0,3}(?:#{1,6}[ ]|\*\*[^*\n]++\*\*[ ]*+$)", re.MULTILINE)
_LINKS = frozenset("of de la le du des del von van der den the di da".split())
COMMON = frozenset(
    "a an the this that these those it its he she they we you i my your his her their our in on at by for from to of with "
    "without as if when while after before since until during because although though however also and or but so then thus "
    "there here no not yes all any each every both some most many few other only please note mr mrs ms dr prof sir "
    "der die das ein eine einen einem einer im am mit nach von für herr frau le la les un une des du en dans pour avec m mme "
    "what who where which how why is are was were be been do does did can could will would shall should may might must".split()
)
_MOST_NAME_WORDS = 12  # of a name
_GERMAN = frozenset(
    "der das dem und ist hat nicht ein eine einen im mit für wird wurde sind haben bei aus auf von sich zum zur".split()
)
_TITLED = re.compile(r"\b(?:Frau|Herrn?|Mrs?|Ms|Dr|Prof|Sir|Madame|Monsieur|Mme|M)\.? $")
_SHARE = 0.1  # of these words, from which a text is German, whose nouns have capitals


class Name(NamedTuple):
    """A run of words with capitals. parts: its folded words, divided at words like "of"; begins: the first one begins a
    sentence, which may be the reason for its capital; is_doubtful: a single word that may be none."""

    start: int
    end: int
    parts: tuple[tuple[str, ...], ...]
    begins: bool
    is_doubtful: bool


def names(text: str) -> list[Name]:
    """Return names in the text, and doubtful ones: words at the beginning of a sentence, and German nouns."""
    tokens = list(_NAME_WORD.finditer(text))
    if not tokens:
        return []
    headings = {found.start() for found in _HEADING.finditer(text)}
    gaps = [text[a.end() : b.start()] for a, b in pairwise(tokens)]
    begins = [True, *(bool(_BEGINS.search(gap)) for gap in gaps)]
    german = [word for token in tokens if (word := token.group().lower()) in _GERMAN]
    capital_nouns = len(set(german)) > 1 and len(german) >= _SHARE * len(tokens)
    out: list[Name] = []
    at = 0
    while at < len(tokens):
        if not tokens[at].group()[0].isupper():
            at += 1
            continue
        end = at + 1
        while end < len(tokens) and (
            gaps[end - 1] == " " or (gaps[end - 1] == ". " and len(tokens[end - 1].group()) == 1)
        ):
            step = 1
            if tokens[end].group() in _LINKS and end + 1 < len(tokens) and gaps[end] == " ":
                step = 2
            if not tokens[end + step - 1].group()[0].isupper():
                break
            end += step
        name = _name(text, tokens[at:end], begins[at], capital_nouns)
        if name is not None and text.rfind("\n", 0, name.start) + 1 not in headings:
            out.append(name)
        at = end
    return out


def _name(text: str, run: Sequence[re.Match[str]], begins: bool, capital_nouns: bool) -> Name | None:
    while run and _APOSTROPHE.split(run[0].group().lower())[0] in COMMON:
        run, begins = run[1:], False
    if not run or len(run) > _MOST_NAME_WORDS or (len(run) == 1 and len(run[0].group()) == 1):
        return None
    start, end = run[0].start(), run[-1].end()
    if begins and re.match(r"[*_]{0,2}[ ]?:", text[end : end + 4]):  # a label
        return None
    parts: list[tuple[str, ...]] = [()]
    for token in run:
        if token.group() in _LINKS:
            parts.append(())
        else:
            parts[-1] += tuple(words(folded(token.group()).removesuffix("'s")))
    parts = [part for part in parts if part]
    is_doubtful = max(map(len, parts)) == 1 and (capital_nouns or (begins and len(parts) == 1))
    return Name(start, end, tuple(parts), begins, is_doubtful and not _TITLED.search(text, max(0, start - 8), start))
