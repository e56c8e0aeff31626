"""Kernel tests: `numeric/` runs on a GPU if there is one, else in Triton's interpreter in processes of its own.

The interpreter is chosen when a kernel is decorated, so one process either interprets or compiles;
`test_interpreter.py` starts the interpreting ones.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `cases`

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED or torch.cuda.is_available() else ["numeric"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "torture" in config.getoption("-m"):
        return
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("torture"):
            item.add_marker(pytest.mark.skip(reason="torture: run with -m torture"))
