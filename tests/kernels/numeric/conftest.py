from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_references import poisoned_outputs


@pytest.fixture
def device() -> torch.device:
    import triton

    return torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    with poisoned_outputs():
        yield
