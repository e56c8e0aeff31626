"""Quantised weights: KV of their own, and where they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_kernels import compiled

Cli = Callable[..., Any]
needs_compiled = pytest.mark.skipif(not compiled.multiplies(torch.float32), reason="no code was compiled")


@needs_compiled
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_an_answer_with_quantised_weights(cli: Cli, docs: Path, kind: str) -> None:
    int8 = ("--weight-dtype", kind)
    ids = cli("precompute", "docs", *int8, "-q").out.split()
    asked = ("ask", "alpha", "--chunks", ",".join(ids), "--max-tokens", "3", "--json", "--verify", *int8)
    answer = cli(*asked, "--ratio", "1", "--selector", "hkvd").records[0]
    assert {c["status"] for c in answer["chunks"]} <= {"exact", "blended"}
    assert answer["verify"]["kl"] < 1e-6
    assert answer["verify"]["top1_agree"]
    refused = cli("ask", "alpha")
    assert refused.code == 3
    assert f"--weight-dtype {kind}" in refused.err


def test_an_unknown_weight_dtype_is_refused(cli: Cli) -> None:
    refused = cli("ask", "alpha", "--weight-dtype", "int3")
    assert refused.code == 2
    assert "int4" in refused.err


@needs_compiled
def test_weight_dtype_can_be_configured(cli: Cli) -> None:
    assert cli("config", "set", "weight_dtype", "int8").code == 0
    shown = cli("config", "show", "--json").records[0]
    assert "int8" in json.dumps(shown)
