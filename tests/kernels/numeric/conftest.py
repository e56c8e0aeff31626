from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_references import poisoned_outputs


@pytest.fixture(scope="session", autouse=True)
def _language_patched_once() -> Iterator[None]:
    """The interpreter replaces the functions of `triton.language` at each launch and at each call of a device function,
    which takes half of the time. Here they stay replaced."""
    from triton.runtime import interpreter

    patch_language, patched = interpreter._patch_lang, list[set[str]]()

    def once(kernel: Any) -> SimpleNamespace:
        modules = (interpreter.tl, interpreter.tl.core)
        languages = {m.__name__ for m in modules if any(value is m for value in kernel.__globals__.values())}
        if languages not in patched:
            patched.append(languages)
            patch_language(kernel)
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        yield


@pytest.fixture
def device() -> torch.device:
    import triton

    return torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    with poisoned_outputs():
        yield
