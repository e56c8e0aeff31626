"""The core imports no feature and no connector, and names none."""

from __future__ import annotations

import re
from pathlib import Path

import grimp

import cacheblend_cli.engine.core as core

FEATURES = r"FullCheck|\bhanded\b(?! over)|\btier|verify|confirm|\bauto\b|missing chunk|attention share|\bllama\b|prompt lookup"


def test_the_core_names_no_feature() -> None:
    for file in Path(core.__path__[0]).glob("*.py"):
        found = re.findall(FEATURES, file.read_text(encoding="utf-8"), re.IGNORECASE)
        assert not found, f"{file.name}: {found}"


def test_the_core_imports_no_feature() -> None:
    graph = grimp.build_graph("cacheblend_cli")
    for package in ("features", "connectors"):
        path = graph.find_shortest_chains("cacheblend_cli.engine.core", f"cacheblend_cli.engine.{package}")
        assert not path
