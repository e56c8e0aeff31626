"""Strings that make a backtracking matcher slow, from the parse tree of a pattern: repetitions of what it matches,
after a beginning that it matches and before an end that it does not."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from re import _constants as c  # type: ignore[attr-defined]
from typing import Any

from step_matcher import Node, test_of, tree

_OTHER = "\x01"  # in few classes
_SAMPLES = "a0_ \t\n\v.-/<>(){}[]'\"\\é\u3042" + _OTHER
_MOST_EXAMPLES = 40  # examples of a part
_MOST_CHARACTERS = 8


@dataclass(frozen=True)
class Attack:
    """A family of strings: begin + unit * count + end."""

    begin: str
    unit: str
    end: str

    def text(self, length: int, times: int = 1) -> str:
        """Return a text with at least `length` characters in its middle, `times` as many units."""
        return self.begin + self.unit * (times * -(-length // len(self.unit))) + self.end


def attacks(pattern: re.Pattern[Any], most: int) -> list[Attack]:
    """Return at most `most` families for a pattern, the same in each run."""
    nodes = tree(pattern)
    characters = _characters(nodes, pattern.flags)
    examples = _examples(nodes, pattern.flags)
    runs = dict.fromkeys(unit for unit in _inner(nodes, pattern.flags) if unit)
    pairs = dict.fromkeys("".join(pair) for pair in product(characters, repeat=2) if pair[0] != pair[1])
    begins = ["", *_spread(_beginnings(nodes, pattern.flags), 12)]
    units = dict.fromkeys((*characters, *begins, *_spread([*examples, *runs], 16), *pairs))
    ends = list(dict.fromkeys(("", _OTHER, *_spread(characters, 4))))
    found = [Attack(*parts) for parts in product(begins, filter(None, units), ends)]
    return random.Random(0).sample(found, min(most, len(found)))


def _spread(values: Any, most: int) -> Any:
    step = max(1, -(-len(values) // most))
    return values[::step]


def _walk(nodes: Any) -> Iterator[Node]:
    for op, value in nodes:
        yield op, value
        for inner in _children(op, value):
            yield from _walk(inner)


def _children(op: Any, value: Any) -> list[Any]:
    if op is c.SUBPATTERN:
        return [value[3]]
    if op is c.BRANCH:
        return list(value[1])
    if op in (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT):
        return [value[2]]
    if op is c.ATOMIC_GROUP:
        return [value]
    return [value[1]] if op in (c.ASSERT, c.ASSERT_NOT) else []


def _characters(nodes: Any, flags: int) -> list[str]:
    """Return characters that the tests of the pattern tell apart, one of each kind."""
    tests, samples = [], list(_SAMPLES)
    for node in _walk(nodes):
        if (test := test_of(node, flags)) is None:
            continue
        if node[0] in (c.LITERAL, c.NOT_LITERAL):
            samples.append(chr(node[1]))
        if node[0] is not c.LITERAL:
            tests.append(test)
            for op, value in node[1] if node[0] is c.IN else ():
                samples += [chr(value)] if op is c.LITERAL else [chr(value[0])] if op is c.RANGE else []
    kinds = {tuple(test(sample) for test in tests): sample for sample in reversed(samples)}
    return _spread(sorted(kinds.values()), _MOST_CHARACTERS)


def _example(node: Node, flags: int) -> list[str]:
    """Return short texts that the node matches."""
    op, value = node
    if (test := test_of(node, flags)) is not None:
        if op is c.LITERAL:
            return [chr(value)]
        named = [chr(v) for o, v in value if o is c.LITERAL] if op is c.IN else []
        found = [sample for sample in (*named[:2], *_SAMPLES) if test(sample)]
        return list(dict.fromkeys(found))[:2] or [next(x for x in map(chr, range(0x110000)) if test(x))]
    if op is c.SUBPATTERN:
        return _examples(value[3], flags)
    if op is c.BRANCH:
        return [text for choice in value[1] for text in _examples(choice, flags)]
    if op in (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT):
        low, _, inner = value
        few = _examples(inner, flags)
        return [*(text * max(low, 1) for text in few), *([""] if not low else [])]
    return _examples(value, flags) if op is c.ATOMIC_GROUP else [""]


def _examples(nodes: Any, flags: int) -> list[str]:
    """Return short texts that the nodes match, one after the other."""
    found = [""]
    for node in nodes:
        found = [a + b for a, b in product(found, _example(node, flags))]
        found = list(dict.fromkeys(_spread(found, _MOST_EXAMPLES)))
    return found


def _inner(nodes: Any, flags: int) -> Iterator[str]:
    """Yield examples of what is repeated or chosen inside the pattern."""
    for op, value in _walk(nodes):
        for inner in _children(op, value):
            yield from _examples(inner, flags)[:8]


def _beginnings(nodes: Any, flags: int) -> list[str]:
    """Return examples of the pattern's beginnings, up to each of its parts."""
    flat = list(nodes)
    while any(op is c.SUBPATTERN for op, _ in flat):
        flat = [inner for op, value in flat for inner in (value[3] if op is c.SUBPATTERN else [(op, value)])]
    return list(dict.fromkeys(text for stop in range(1, len(flat) + 1) for text in _examples(flat[:stop], flags)[:3]))
