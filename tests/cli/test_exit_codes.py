"""Errors of libraries below, and the exit code and next step each becomes."""

from __future__ import annotations

import pytest
import torch

from cacheblend_cli.cli.exits import report
from cacheblend_cli.cli.output import Output


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 5, "fewer chunks"),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), 5, "cacheblend doctor"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 1, "a fault of cacheblend"),
    ],
)
def test_what_a_device_says(error: Exception, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(error, Output()) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
