"""kv_pool_dtype: format of KV while a question is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Cli = Callable[..., Any]


@pytest.mark.parametrize("mode", ["blend", "full", "reuse"])
def test_a_float8_pool_answers(cli: Cli, stored: list[str], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (
        "ask",
        "who leads billing?",
        "--chunks",
        ",".join(stored[:3]),
        "--mode",
        mode,
        "--max-tokens",
        "4",
        "--json",
    )
    plain = cli(*asked, "--verify")
    monkeypatch.setenv("CACHEBLEND_KV_POOL_DTYPE", "float8_e4m3")
    float8 = cli(*asked, "--verify")
    assert float8.code == 0, float8.err
    ours, reference = float8.records[0], plain.records[0]
    assert ours["kv_bytes_loaded"] == reference["kv_bytes_loaded"]  # the store holds what it held
    assert ours["prompt_tokens"] == reference["prompt_tokens"]
    assert ours["generated_tokens"] == 4


def test_kv_pool_dtype_is_a_setting_and_unknown_values_are_refused(
    cli: Cli, stored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("config", "set", "kv_pool_dtype", "float8_e4m3").code == 0
    assert cli("config", "set", "kv_pool_dtype", "int4").code == 2
    monkeypatch.setenv("CACHEBLEND_KV_POOL_DTYPE", "int4")
    refused = cli("ask", "who?", "--chunks", stored[0])
    assert refused.code == 2
    assert "'int4'" in refused.err
    assert "float8_e4m3" in refused.err
