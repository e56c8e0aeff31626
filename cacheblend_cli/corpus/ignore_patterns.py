"""Match paths against .gitignore patterns in linear time.

All patterns with wildcards of a file are one automaton, simulated on the bits of an integer (Shift-And): each character
of a path costs a few operations on that integer, whatever the patterns are. Patterns without wildcards are looked up in
a dictionary. Differences from git: `?` and sets match characters, not bytes.

Libraries differ more: of 24,000 random rule files as in tests/corpus/test_ignore_patterns.py, ignore-python 0.4.2
(ripgrep's rules) answers 2,922 unlike git, pathspec 1.1.1 3,266, and that takes seconds for a pattern with six stars.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cacheblend_cli.errors import UsageError

_SPECIAL = frozenset("*?[\\")
_MAX_LENGTH = 4096
"""Longest pattern with wildcards, in characters. No path is longer; longer patterns are disregarded."""
_CACHED_MASKS = 256
MAX_SIZE = 1 << 15
"""Largest sum of `IgnorePatterns.size`: a character of a path takes time in proportion to it."""
_RANGE_SIZE = 64  # what a range of characters adds to the size
_SETS = {
    "alnum": "09AZaz", "alpha": "AZaz", "blank": "  \t\t", "cntrl": "\0\x1f\x7f\x7f", "digit": "09", "graph": "!~", "lower": "az",
    "print": " ~", "punct": "!/:@[`{~", "space": "  \t\n\r\r", "upper": "AZ", "xdigit": "09AFaf",
}  # fmt: skip
"""POSIX class -> first and last characters of its ranges."""


class TooManyPatterns(UsageError):
    """Patterns with wildcards larger than MAX_SIZE."""

    def __init__(self) -> None:
        super().__init__(
            f"patterns with wildcards have more than {MAX_SIZE:,} characters (each range counts as {_RANGE_SIZE})"
        )


class _NeverMatches(Exception):
    """Raised for a pattern that git accepts but that matches no path."""


@dataclass(frozen=True)
class _Set:
    """Characters between brackets."""

    ranges: tuple[tuple[str, str], ...]  # both ends belong to a range
    negated: bool

    def __contains__(self, c: str) -> bool:
        return any(first <= c <= last for first, last in self.ranges) != self.negated


# Tokens of a pattern, next to single characters and sets.
_ANY = "?"  # a character except a slash
_STAR = "*"  # any number of characters except slashes
_DEEP = "**"  # any number of characters
_OPTIONAL = "**/"  # in front of [_DEEP, "/"]: the three may match nothing
_Token = tuple[str, str | _Set]
"""A kind ("char", "set" or "wildcard") and its value."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder at or below the folder of the patterns."""

    path: str  # relative to that folder, with a trailing slash; "" for that folder
    state: int  # states of the automaton after the path


class IgnorePatterns:
    """Patterns of an ignore file, or of a flag. Raises TooManyPatterns."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._includes = list[bool]()  # of each pattern: False if negated
        self._literals: dict[str, int] = {}  # path -> number of its last pattern; a path with a slash begins with one
        self._literal_folders: dict[str, int] = {}  # the same for patterns that end with a slash
        self._has_literal_paths = False
        self._automaton = _Automaton()
        for line in lines:
            self._add(line)
        self._automaton.finish()
        self.top = Folder("", self._automaton.start)

    @classmethod
    def of_text(cls, text: str) -> IgnorePatterns:
        return cls(line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n"))

    def __bool__(self) -> bool:
        return bool(self._includes)

    @property
    def size(self) -> int:
        """Characters in patterns with wildcards, and _RANGE_SIZE for each range of a set."""
        return self._automaton.size

    def within(self, folder: Folder, name: str) -> Folder:
        return Folder(f"{folder.path}{name}/", self._advance(folder.state, f"{name}/"))

    def verdict(self, folder: Folder, name: str, *, is_folder: bool) -> bool | None:
        """Return True if the last pattern that matches an entry of the folder ignores it, False if it is negated, None
        if none matches. Patterns that match a folder above the entry do not count."""
        last = self._literals.get(name, -1)
        if is_folder:
            last = max(last, self._literal_folders.get(name, -1))
        if self._has_literal_paths:
            path = f"/{folder.path}{name}"
            last = max(last, self._literals.get(path, -1))
            if is_folder:
                last = max(last, self._literal_folders.get(path, -1))
        if self._automaton:
            state = self._advance(folder.state | self._automaton.name_start, name)
            last = max(last, self._automaton.last_accepted(state, is_folder=is_folder))
        return None if last < 0 else self._includes[last]

    def _advance(self, state: int, text: str) -> int:
        for c in text:
            if not state:
                break
            state = self._automaton.step(state, c)
        return state

    def _add(self, line: str) -> None:
        pattern = _trimmed(line.partition("\0")[0])
        if not pattern or pattern.startswith("#"):
            return
        includes, pattern = not pattern.startswith("!"), pattern.removeprefix("!")
        folders_only, pattern = pattern.endswith("/"), pattern.removesuffix("/")
        is_path = "/" in pattern
        pattern = pattern.removeprefix("/")
        if not pattern:
            return
        number = len(self._includes)
        tokens = list[_Token]()
        if not _SPECIAL.isdisjoint(pattern):
            if len(pattern) > _MAX_LENGTH:
                return
            try:
                tokens = list(_tokens(pattern, is_path=is_path))
            except _NeverMatches:
                return
            if all(kind == "char" for kind, _ in tokens):
                pattern, tokens = "".join(str(value) for _, value in tokens), []
        self._includes.append(includes)
        if tokens:
            self._automaton.add(tokens, number, is_path=is_path, folders_only=folders_only)
            return
        (self._literal_folders if folders_only else self._literals)[f"/{pattern}" if is_path else pattern] = number
        self._has_literal_paths |= is_path


class _Automaton:
    """Nondeterministic automaton of many patterns. States are bits of an integer; a state means that the tokens of its
    pattern before it have matched.

    start: states in the folder of the patterns.
    name_start: states to add in each folder, for the patterns without a slash.
    """

    def __init__(self) -> None:
        self.start = self.name_start = 0
        self._num_states = self.size = 0
        self._of_char: dict[str, list[int]] = {}  # character -> states that it advances
        self._of_set: dict[_Set, list[int]] = {}
        self._at: dict[str, list[int]] = {_ANY: [], _STAR: [], _DEEP: [], _OPTIONAL: []}
        self._starts, self._name_starts = list[int](), list[int]()
        self._accepts, self._folder_accepts, self._numbers = list[int](), list[int](), list[int]()
        self._masks: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def add(self, tokens: list[_Token], number: int, *, is_path: bool, folders_only: bool) -> None:
        """Add a pattern. number: larger than those before it."""
        (self._starts if is_path else self._name_starts).append(self._num_states)
        for state, (kind, value) in enumerate(tokens, self._num_states):
            if kind == "char":
                self._of_char.setdefault(str(value), []).append(state)
            elif isinstance(value, _Set):
                self.size += _RANGE_SIZE * len(value.ranges) * (value not in self._of_set)
                self._of_set.setdefault(value, []).append(state)
            else:
                self._at[value].append(state)
        self._num_states += len(tokens) + 1
        self.size += len(tokens) + 1
        if self.size > MAX_SIZE:
            raise TooManyPatterns
        (self._folder_accepts if folders_only else self._accepts).append(self._num_states - 1)
        self._numbers.append(number)

    def finish(self) -> None:
        """Call after the last pattern."""
        self._any, self._star, self._deep, self._optional = map(self._bits, self._at.values())
        self._loop, self._ends = self._star | self._deep, sorted(self._accepts + self._folder_accepts)
        self._accept = self._bits(self._accepts)
        self._accept_folder = self._accept | self._bits(self._folder_accepts)
        self.name_start = self._with_skipped(self._bits(self._name_starts))
        self.start = self._with_skipped(self._bits(self._starts))

    def step(self, state: int, c: str) -> int:
        mask = self._masks.get(c)
        if mask is None:
            mask = self._mask(c)
        looping = state & (self._deep if c == "/" else self._loop)
        return self._with_skipped((state & mask) << 1 | looping)

    def last_accepted(self, state: int, *, is_folder: bool) -> int:
        """Return the largest number of a pattern that has matched, -1 without one."""
        accepted = state & (self._accept_folder if is_folder else self._accept)
        return self._numbers[bisect_right(self._ends, accepted.bit_length() - 1) - 1] if accepted else -1

    def _with_skipped(self, state: int) -> int:
        """Add the states behind tokens that may match nothing."""
        optional = state & self._optional
        state |= optional << 1 | optional << 3
        return state | (state & self._loop) << 1

    def _mask(self, c: str) -> int:
        """Return the states that a character advances."""
        found = self._bits(self._of_char.get(c, ()))
        if c != "/":
            found |= self._any | self._bits(s for chars, states in self._of_set.items() if c in chars for s in states)
        if len(self._masks) >= _CACHED_MASKS:
            self._masks.clear()
        self._masks[c] = found
        return found

    def _bits(self, states: Iterable[int]) -> int:
        bits = bytearray(self._num_states // 8 + 1)
        for state in states:
            bits[state >> 3] |= 1 << (state & 7)
        return int.from_bytes(bits, "little")


def _trimmed(line: str) -> str:
    """Remove trailing spaces that no backslash precedes."""
    kept = line.rstrip(" ")
    num_backslashes = len(kept) - len(kept.rstrip("\\"))
    return kept + " " if num_backslashes % 2 and kept != line else kept


def _tokens(pattern: str, *, is_path: bool) -> Iterator[_Token]:
    """Yield the tokens of a pattern. Raises _NeverMatches.

    git compares the text before the first wildcard, then the rest, in which `**` counts as the beginning of a segment.
    """
    at, end = 0, len(pattern)
    first = next(i for i, c in enumerate(pattern) if c in _SPECIAL)
    while at < end:
        c = pattern[at]
        if c == "*":
            begin, at = at, _after_stars(pattern, at)
            segment_begins = begin == first or pattern[begin - 1] == "/"
            if not (is_path and at - begin > 1 and segment_begins):
                yield "wildcard", _STAR
            elif at == end or pattern.startswith("\\/", at):
                yield "wildcard", _DEEP
            elif pattern[at] == "/":
                yield from (("wildcard", _OPTIONAL), ("wildcard", _DEEP), ("char", "/"))
                at += 1
                while (after := _after_stars(pattern, at)) > at + 1 and pattern.startswith("/", after):
                    at = after + 1  # "**/**/" means the same as "**/"
            else:
                yield "wildcard", _STAR
            continue
        if c == "[":
            characters, at = _set(pattern, at + 1)
            yield "set", characters
            continue
        if c == "\\":
            at += 1
            if at == end:
                raise _NeverMatches
        yield ("wildcard", _ANY) if c == "?" else ("char", pattern[at])
        at += 1


def _after_stars(pattern: str, at: int) -> int:
    while pattern.startswith("*", at):
        at += 1
    return at


def _set(pattern: str, at: int) -> tuple[_Set, int]:
    """Parse a set after its "[", and return it with the position after its "]". Raises _NeverMatches."""
    negated = pattern[at : at + 1] in ("!", "^") and at < len(pattern)
    at += negated
    ranges, previous, begin = list[tuple[str, str]](), "", at

    def char() -> str:
        nonlocal at
        at += pattern[at : at + 1] == "\\"
        if at >= len(pattern):
            raise _NeverMatches
        at += 1
        return pattern[at - 1]

    while at == begin or pattern[at : at + 1] != "]":
        if pattern.startswith("[:", at) and (name := _posix_name(pattern, at + 2)) is not None:
            if name not in _SETS:
                raise _NeverMatches
            ranges += zip(_SETS[name][::2], _SETS[name][1::2], strict=True)
            at, previous = at + len(name) + 4, ""
        elif previous and pattern[at : at + 1] == "-" and pattern[at + 1 : at + 2] not in ("", "]"):
            at += 1
            ranges.append((previous, char()))
            previous = ""
        else:
            previous = char()
            ranges.append((previous, previous))
    return _Set(tuple(dict.fromkeys(ranges)), negated), at + 1


def _posix_name(pattern: str, at: int) -> str | None:
    """Return the name of a POSIX class that starts here, None if this is not one. Raises _NeverMatches."""
    end = pattern.find("]", at)
    if end < 0:
        raise _NeverMatches
    return pattern[at : end - 1] if end > at and pattern[end - 1] == ":" else None
