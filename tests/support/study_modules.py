"""Import modules of study/."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from cacheblend_cli.blend.corrections import CORRECTIONS
from cacheblend_cli.blend.selectors import SELECTORS

STUDY = Path(__file__).parents[2] / "study"


@contextmanager
def study_modules(*, register: bool = False) -> Iterator[Callable[[str], ModuleType]]:
    """Yield a function that imports a module of the study.

    register: also register the study's selectors and corrections, until the end of the block.
    """
    known = dict(SELECTORS), dict(CORRECTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STUDY))
        if register:
            importlib.import_module("research").register()
        yield importlib.import_module
    for registry, before in zip((SELECTORS, CORRECTIONS), known, strict=True):
        registry.clear()
        registry.update(before)  # type: ignore[arg-type]
