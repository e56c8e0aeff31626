"""Every regular expression of the package takes linear steps, however hostile the text."""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from adversarial import Attack, attacks
from step_matcher import StepMatcher, TooManySteps

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "cacheblend_cli",
    "documents/cacheblend_documents",
    "store/cacheblend_store",
    "connectors/vllm/cacheblend_vllm",
    "kernels/cacheblend_kernels",
    "connectors/ray/cacheblend_ray",
)
FUNCTIONS = ("compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer")
TRUSTED = {
    "model/adapter.py": "patterns of an adapter that the user chose, over its model's module names",
    "model/text_encoder.py": "literals of the tokenizer's control tokens",
    "evaluation/demo_run.py": "answers of the demo's questions, which have a few tokens",
}
"""File -> why its patterns see only bounded or trusted text."""
FACTOR = 2.3  # most growth of the steps when the text is twice as long
MOST = 2000  # steps a character, at which a match is given up


@dataclass(frozen=True)
class Use:
    """A pattern and how it is used. method: "match", "fullmatch" or "finditer", which stands for all that search."""

    where: str
    pattern: re.Pattern[Any]
    method: str


def files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def namespace(path: Path, tree: ast.Module) -> dict[str, Any]:
    """Return the names of a module: its own constants, or all of them if it can be imported."""
    found: dict[str, Any] = {"re": re}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and not _calls(statement):
            try:
                exec(compile(ast.Module([statement], []), str(path), "exec"), found)  # noqa: S102
            except Exception:
                continue
    return found


def evaluated(path: Path, tree: ast.Module, node: ast.expr) -> Any:
    expression = compile(ast.Expression(node), str(path), "eval")
    try:
        return eval(expression, namespace(path, tree))  # noqa: S307
    except NameError:
        relative = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(relative if relative[0] == "cacheblend_cli" else relative[1:])
        return eval(expression, vars(importlib.import_module(name)) | {"re": re})  # noqa: S307


def _calls(tree: ast.AST) -> list[ast.Call]:
    """Return the calls of `re`'s functions, without those of statements inside the statement."""
    waiting, found = [tree], list[ast.Call]()
    while waiting:
        node = waiting.pop()
        waiting += [inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, ast.stmt)]
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FUNCTIONS
        if is_method and isinstance(node.func.value, ast.Name) and node.func.value.id == "re":  # type: ignore[attr-defined]
            found.append(node)  # type: ignore[arg-type]
    return found


def method(names: set[str]) -> str:
    return names.pop() if len(names) == 1 and names <= {"match", "fullmatch"} else "finditer"


def uses_of(name: str, trees: list[ast.Module]) -> set[str]:
    """Return the methods that are called on a name; another use of it is "passed"."""
    found, called = set[str](), set[int]()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_named(node.value, name):
                found.add(node.attr)
                called.add(id(node.value))
    for tree in trees:
        for node in ast.walk(tree):
            if _is_named(node, name) and id(node) not in called and isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
                found.add("passed")
    return found


def _imports(tree: ast.Module, module: str, name: str) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "").endswith(module)
        and any(alias.name == name for alias in node.names)
        for node in ast.walk(tree)
    )


def _is_named(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def patterns_in(value: Any) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from patterns_in(inner)


@lru_cache
def uses() -> list[Use]:
    """Return every pattern of the package that is not trusted."""
    sources = {path: path.read_text(encoding="utf-8") for path in files()}
    trees = {path: ast.parse(text) for path, text in sources.items() if "re." in text}
    found: dict[tuple[Any, ...], Use] = {}
    for path, tree in trees.items():
        where = "/".join(path.relative_to(ROOT).parts[1:])
        if where in TRUSTED:
            continue
        for statement in ast.walk(tree):
            if isinstance(statement, ast.stmt):
                for use in _uses_in(path, tree, statement, list(trees.values()), where):
                    found[use.pattern.pattern, use.pattern.flags, use.method] = use
    return list(found.values())


def _uses_in(path: Path, tree: ast.Module, statement: ast.stmt, trees: list[ast.Module], where: str) -> Iterator[Use]:
    calls = _calls(statement)
    try:
        for call in calls:
            assert isinstance(call.func, ast.Attribute)
            how = call.func.attr
            flags = [k.value for k in call.keywords if k.arg == "flags"] + (call.args[1:] if how == "compile" else [])
            given = [evaluated(path, tree, node) for node in (call.args[0], *flags)]
            pattern = re.compile(*given)
            names = {how}
            if how == "compile":
                target = statement.targets[0] if isinstance(statement, ast.Assign) else None
                alone = isinstance(target, ast.Name) and statement.value is call  # type: ignore[attr-defined]
                names = {"passed"}
                if alone:
                    assert isinstance(target, ast.Name)
                    names = uses_of(target.id, [tree, *(t for t in trees if _imports(t, path.stem, target.id))])
            yield Use(f"{where}:{call.lineno}", pattern, method(names))
    except NameError:  # a comprehension of patterns
        assert isinstance(statement, ast.Assign), f"{where}:{statement.lineno}: a pattern that is not a constant"
        for pattern in patterns_in(evaluated(path, tree, statement.value)):
            yield Use(f"{where}:{statement.lineno}", pattern, "finditer")


@lru_cache
def matcher_of(use: Use) -> StepMatcher:
    return StepMatcher(use.pattern)


def steps(use: Use, text: str) -> float:
    matcher = matcher_of(use)
    matcher.steps, matcher.most = 0, MOST * len(text)
    try:
        _ = list(matcher.finditer(text)) if use.method == "finditer" else getattr(matcher, use.method)(text)
    except TooManySteps:
        return math.inf
    return matcher.steps


def growth(use: Use, attack: Attack, length: int) -> float:
    longer = steps(use, attack.text(length, 2))
    return longer if longer == math.inf else longer / steps(use, attack.text(length))


def check(use: Use, most: int) -> None:
    for attack in attacks(use.pattern, most):
        if growth(use, attack, 24) > FACTOR and growth(use, attack, 96) > FACTOR:
            found = growth(use, attack, 192)
            assert found <= FACTOR, f"{use.where} {use.method}: {use.pattern.pattern!r} over {attack}: {found:.1f}"


@pytest.mark.parametrize("use", uses(), ids=lambda use: f"{use.where} {use.method}")
@pytest.mark.parametrize("most", [250, pytest.param(8000, marks=pytest.mark.torture)])
def test_steps_are_linear(use: Use, most: int) -> None:
    check(use, most)


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"(#{1,6})[ \t]+(.*?)[ \t]*#*[ \t]*", "fullmatch"),
        (r"(?s).*?(?:\n(?:[ \t]*\n)+(?=[^\s})\]])|\Z)", "finditer"),
        (r"\s+$", "finditer"),
        (r"unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", "fullmatch"),
        (r"<\?xml.*?<Code>", "finditer"),
        (r"(?:a|aa)*b", "match"),
        (r"(\w+)*-", "match"),
        (r'"(?:[^"\\]|\\.)*"|[^\[\]{}"]', "finditer"),
    ],
)
def test_patterns_that_are_not_linear_are_found(pattern: str, method: str) -> None:
    with pytest.raises(AssertionError, match="over Attack"):
        check(Use("a pattern", re.compile(pattern), method), 300)


@pytest.mark.parametrize("use", uses(), ids=lambda use: f"{use.where} {use.method}")
def test_the_matcher_matches_as_re_does(use: Use) -> None:
    is_bytes = isinstance(use.pattern.pattern, bytes)
    for attack in attacks(use.pattern, 40):
        text = attack.text(6)
        given: Any = text.encode("latin-1", "replace") if is_bytes else text
        text = given.decode("latin-1") if is_bytes else text
        matcher = matcher_of(use)
        matcher.steps, matcher.most = 0, 1 << 20
        if use.method == "finditer":
            assert list(matcher.finditer(text)) == [m.span() for m in use.pattern.finditer(given)], (use, text)
        else:
            found = getattr(use.pattern, use.method)(given)
            assert getattr(matcher, use.method)(text) == (found.end() if found else None), (use, text)
