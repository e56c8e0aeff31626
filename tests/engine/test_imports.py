"""Modules of the engine import one another in one direction."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import cacheblend_cli

ENGINE = "cacheblend_cli.engine."


def test_no_module_of_the_engine_imports_itself_in_a_circle() -> None:
    """Type-only imports and those within functions count, too. TopologicalSorter raises CycleError."""
    graph = {}
    for path in (Path(cacheblend_cli.__file__).parent / "engine").glob("*.py"):
        tree = ast.parse(path.read_text())
        names = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
        graph[path.stem] = {name.removeprefix(ENGINE) for name in names if name.startswith(ENGINE)}
    assert "core" in list(TopologicalSorter(graph).static_order())
