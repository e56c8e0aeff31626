"""Matcher of regular expressions that counts its steps. It backtracks as `re` does, over the same parse tree."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from re import _constants as c  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

Node = tuple[Any, Any]
Test = Callable[[str], bool]
_CATEGORIES: dict[Any, Test] = {
    c.CATEGORY_DIGIT: str.isdigit,
    c.CATEGORY_NOT_DIGIT: lambda x: not x.isdigit(),
    c.CATEGORY_SPACE: str.isspace,
    c.CATEGORY_NOT_SPACE: lambda x: not x.isspace(),
    c.CATEGORY_WORD: lambda x: x.isalnum() or x == "_",
    c.CATEGORY_NOT_WORD: lambda x: not (x.isalnum() or x == "_"),
}
_REPEATS = (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT)


class TooManySteps(Exception):
    """Raised when a match takes more steps than allowed."""


class Instruction(NamedTuple):
    op: str
    a: Any = None
    b: Any = None


def tree(pattern: re.Pattern[Any]) -> list[Node]:
    return list(_parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG))


def test_of(node: Node, flags: int) -> Test | None:
    """Return the test of a node that matches one character, None for other nodes."""
    op, value = node
    if op is c.IN:
        tests = [_member(item) for item in value if item[0] is not c.NEGATE]
        negated = any(item[0] is c.NEGATE for item in value)
        found: Test = lambda x: any(test(x) for test in tests) != negated  # noqa: E731
    elif op is c.LITERAL:
        found = lambda x: ord(x) == value  # noqa: E731
    elif op is c.NOT_LITERAL:
        found = lambda x: ord(x) != value  # noqa: E731
    elif op is c.ANY:
        found = (lambda x: True) if flags & re.DOTALL else (lambda x: x != "\n")
    else:
        return None
    if flags & re.IGNORECASE:
        return lambda x: found(x.lower()) or found(x.upper())
    return found


def _member(item: Node) -> Test:
    op, value = item
    if op is c.RANGE:
        return lambda x: value[0] <= ord(x) <= value[1]
    return _CATEGORIES[value] if op is c.CATEGORY else lambda x: ord(x) == value


class StepMatcher:
    """Matches one pattern and counts `steps`. Beyond `most` it raises TooManySteps."""

    def __init__(self, pattern: re.Pattern[Any]) -> None:
        self.steps, self.most, self._num_marks = 0, 1 << 20, 0
        self._num_groups = 2 * (pattern.groups + 1)
        self._program = self._compiled(tree(pattern), pattern.flags)
        self._registers = [-1] * (self._num_groups + self._num_marks)

    def fullmatch(self, text: str) -> int | None:
        return self._run(self._program, text, 0, list(self._registers), full=True)

    def match(self, text: str, start: int = 0) -> int | None:
        """Return the end of the match at `start`, None if there is none."""
        return self._run(self._program, text, start, list(self._registers))

    def finditer(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the matches."""
        start = 0
        while start <= len(text):
            end = self.match(text, start)
            if end is not None:
                yield start, end
            start = start + 1 if end is None else max(end, start + 1)

    def search(self, text: str) -> int | None:
        return next((end for _, end in self.finditer(text)), None)

    def _compiled(self, nodes: Any, flags: int) -> list[Instruction]:
        program: list[Instruction] = []
        self._emit(program, nodes, flags)
        return [*program, Instruction("match")]

    def _emit(self, program: list[Instruction], nodes: Any, flags: int) -> None:
        for node in nodes:
            op, value = node
            if (test := test_of(node, flags)) is not None:
                program.append(Instruction("test", test))
            elif op is c.SUBPATTERN:
                group, added, removed, inner = value
                if group is not None:
                    program.append(Instruction("save", 2 * group))
                self._emit(program, inner, (flags | added) & ~removed)
                if group is not None:
                    program.append(Instruction("save", 2 * group + 1))
            elif op is c.BRANCH:
                jumps = []
                for number, choice in enumerate(value[1]):
                    split = len(program)
                    program.append(Instruction("split"))
                    self._emit(program, choice, flags)
                    jumps.append(len(program))
                    program.append(Instruction("jump"))
                    other = len(program) if number < len(value[1]) - 1 else None
                    program[split] = Instruction("split", split + 1, other)
                for jump in jumps:
                    program[jump] = Instruction("jump", len(program))
            elif op in _REPEATS:
                self._emit_repeat(program, op, value, flags)
            elif op is c.ATOMIC_GROUP:
                program.append(Instruction("atomic", self._compiled(value, flags)))
            elif op in (c.ASSERT, c.ASSERT_NOT):
                direction, inner = value
                width = inner.getwidth()[0] if direction < 0 else 0
                program.append(Instruction("look", self._compiled(inner, flags), (width, op is c.ASSERT)))
            elif op is c.GROUPREF:
                program.append(Instruction("same", value))
            elif op is c.AT:
                program.append(Instruction("at", value, flags))
            else:
                raise NotImplementedError(op)

    def _emit_repeat(self, program: list[Instruction], op: Any, value: Any, flags: int) -> None:
        low, high, inner = value
        if op is c.POSSESSIVE_REPEAT:
            program.append(Instruction("atomic", self._compiled([(c.MAX_REPEAT, value)], flags)))
            return
        for _ in range(low):
            self._emit(program, inner, flags)
        splits, begin = [], len(program)
        for _ in range(1 if high is c.MAXREPEAT else high - low):
            splits.append(len(program))
            program.append(Instruction("split"))
            if inner.getwidth()[0]:
                self._emit(program, inner, flags)
                continue
            mark = self._num_groups + self._num_marks
            self._num_marks += 1
            program.append(Instruction("save", mark))
            self._emit(program, inner, flags)
            program.append(Instruction("moved", mark))  # an empty round ends the loop
        if high is c.MAXREPEAT:
            program.append(Instruction("jump", begin))
        for split in splits:
            ways = split + 1, len(program)
            program[split] = Instruction("split", *(ways if op is c.MAX_REPEAT else ways[::-1]))

    def _run(
        self, program: list[Instruction], text: str, start: int, registers: list[int], full: bool = False
    ) -> int | None:
        waiting: list[tuple[int, int, list[int]]] = [(0, start, registers)]
        while waiting:
            at, pos, found = waiting.pop()
            while True:
                self.steps += 1
                if self.steps > self.most:
                    raise TooManySteps
                op, a, b = program[at]
                at += 1
                if op == "test":
                    if pos == len(text) or not a(text[pos]):
                        break
                    pos += 1
                elif op == "split":
                    if b is not None:
                        waiting.append((b, pos, found))
                    at = a
                elif op == "jump":
                    at = a
                elif op == "save":
                    found = [*found]
                    found[a] = pos
                elif op == "moved":
                    if found[a] == pos:
                        break
                elif op == "match":
                    if full and pos < len(text):
                        break
                    registers[:] = found
                    return pos
                elif op == "atomic":
                    found = [*found]
                    if (end := self._run(a, text, pos, found)) is None:
                        break
                    pos = end
                elif op == "look":
                    width, wanted = b
                    found = [*found]
                    seen = pos >= width and self._run(a, text, pos - width, found) is not None
                    if seen != wanted:
                        break
                elif op == "same":
                    if found[2 * a + 1] < 0:
                        break
                    group = text[found[2 * a] : found[2 * a + 1]]
                    if not text.startswith(group, pos):
                        break
                    pos += len(group)
                elif not _is_at(a, text, pos, b):
                    break
        return None


def _is_at(what: Any, text: str, pos: int, flags: int) -> bool:
    lines = bool(flags & re.MULTILINE)
    if what in (c.AT_BOUNDARY, c.AT_NON_BOUNDARY):
        is_word = _CATEGORIES[c.CATEGORY_WORD]
        sides = [is_word(x) for x in (text[pos - 1 : pos], text[pos : pos + 1]) if x]
        return (sides.count(True) == 1) == (what is c.AT_BOUNDARY)
    if what is c.AT_BEGINNING:
        return pos == 0 or (lines and text[pos - 1] == "\n")
    if what is c.AT_END:
        return text[pos:] in ("", "\n") if len(text) - pos < 2 else lines and text[pos] == "\n"
    return pos == (0 if what is c.AT_BEGINNING_STRING else len(text))
