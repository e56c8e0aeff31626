"""The risk: fitted by `eval`, kept to by `ask`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import WORDS

Cli = Callable[..., Any]


@pytest.fixture
def questions(tmp_path: Path) -> str:
    rows = [
        {
            "question": f"{WORDS[n]}?",
            "ctxs": [{"text": " ".join(WORDS[(n + c) % 9 : (n + c) % 9 + 9])} for c in range(3)],
        }
        for n in range(14)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_fitted_by_eval_and_kept_to_by_ask(
    cli: Cli, stored: list[str], questions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blend = ("--mode", "reuse", "--max-tokens", "8")
    asked = ("ask", "who?", "--chunks", ",".join(reversed(stored)), *blend)
    refused = cli(*asked, "--max-risk", "0.2", "--json")
    assert refused.code == 2
    assert "cacheblend eval QUESTIONS.jsonl --fit-risk" in refused.err
    fitted = cli("eval", questions, "--fit-risk", "--no-noise-floor", *blend)
    assert fitted.code == 0, fitted.err
    assert "risk" in fitted.err
    assert "--max-risk" in fitted.err
    [full, reuse] = [cli(*asked[:4], "--max-tokens", "8", "--mode", mode).out for mode in ("full", "reuse")]
    streamed = cli(*asked, "--max-risk", "0")
    assert streamed.code == 2
    assert "--batch" in streamed.err
    never = cli(*asked, "--max-risk", "0", "--json").records[0]
    assert never["answer"] == full.rstrip("\n")
    assert never["risk"]["full_prefill_at"] == 0
    always = cli(*asked, "--max-risk", "1", "--json").records[0]
    assert always["answer"] == reuse.rstrip("\n")
    assert 0 < always["risk"]["estimate"] <= 1
    assert always["risk"]["full_prefill_at"] is None
    low = ("--max-risk", str(always["risk"]["estimate"] * 0.999))
    questions_file = Path(questions).with_name("asked.jsonl")
    questions_file.write_text(json.dumps({"question": "who?", "chunks": asked[3].split(",")}) + "\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True)
        in_batch = cli("ask", "--batch", str(questions_file), *blend, *low)
    assert "the answer is a full prefill's" in in_batch.err
    for whole in (cli(*asked, *low, "--json"), cli("ask", "--batch", str(questions_file), *blend, *low, "--json")):
        assert whole.records[0]["answer"] == full.rstrip("\n")
        assert whole.records[0]["risk"]["full_prefill_at"] == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [(("--max-risk", "1.5"), "not between 0 and 1"), (("--max-risk", "0.1", "--ratio", "auto"), "auto")],
)
def test_invalid_uses_of_max_risk_are_refused(cli: Cli, stored: list[str], flags: tuple[str, ...], words: str) -> None:
    told = cli("ask", "who?", "--chunks", stored[0], *flags)
    assert told.code == 2
    assert words in told.err
