"""The user's system prompt and wording: a changed beginning of the prompt is another collection, reported before
anything is computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import resolve

Cli = Callable[..., Any]


def statuses(cli: Cli, *arguments: str) -> list[str]:
    result = cli("precompute", "docs", *arguments, "--json")
    assert result.code == 0, result.err
    return [r["status"] for r in result.records]


def ask(cli: Cli, *arguments: str) -> dict[str, Any]:
    result = cli("ask", "alpha beta?", "-k", "2", "--max-tokens", "2", "--json", "--ids", *arguments)
    assert result.code == 0, result.err
    return result.records[0]


def test_a_system_prompt_is_part_of_the_collection(cli: Cli, docs: Path, model: Path) -> None:
    assert set(statuses(cli, "--system", "Be terse.")) == {"new"}
    refused = cli("ask", "alpha beta?")
    assert refused.code == 3
    assert (
        f"2 chunks are stored for {model} with --system 'Be terse.'; you ask for {model} with no --system"
        in refused.err
    )
    assert "--system 'Be terse.'" in refused.err
    refused = cli("ask", "alpha beta?", "--system", "Be kind.", "--salt", "x")
    assert "--system 'Be terse.'" in refused.err
    answer = ask(cli, "--system", "Be terse.", "--verify", "--ratio", "1")
    assert {c["status"] for c in answer["chunks"]} <= {"exact", "blended"}
    assert answer["verify"]["answer_kl"] < 1e-6


def test_another_one_is_said_and_asked_about_before_it_is_computed(cli: Cli, docs: Path) -> None:
    statuses(cli)
    first = ask(cli)
    refused = cli("precompute", "docs", "--system", "Be terse.")
    assert refused.code == 2
    assert all(fact in refused.err for fact in ("2 documents", "no --system", "--system 'Be terse.'"))
    dry = cli("precompute", "docs", "--system", "Be terse.", "--dry-run")
    assert all(fact in dry.err for fact in ("2 documents", "no --system", "--system 'Be terse.'"))
    assert set(statuses(cli, "--system", "Be terse.", "--yes")) == {"new"}
    assert set(statuses(cli, "--system", "Be terse.")) == {"unchanged"}, "what is there is not asked about again"
    assert set(statuses(cli)) == {"unchanged"}, "both stay"
    assert ask(cli)["prompt_ids"] == first["prompt_ids"]
    assert ask(cli, "--system", "Be terse.")["prompt_ids"] != first["prompt_ids"]


def test_only_text_before_the_chunks_is_part_of_the_collection(cli: Cli, docs: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "p.txt"
    prompt.write_text("Read:\n\n{chunks}\n\nNow answer: {question}\n")
    statuses(cli, "--prompt", str(prompt))
    one = ask(cli, "--prompt", str(prompt), "--ratio", "0")
    assert one["chunks"][0]["status"] == "exact"
    prompt.write_text("Read:\n\n{chunks}\n\nSay it in French: {question}")
    assert set(statuses(cli, "--prompt", str(prompt))) == {"unchanged"}
    assert ask(cli, "--prompt", str(prompt))["prompt_ids"] != one["prompt_ids"]
    prompt.write_text("Look at:\n\n{chunks}\n\nNow answer: {question}\n")
    refused = cli("ask", "alpha beta?", "--prompt", str(prompt))
    assert refused.code == 3
    assert r"with --prompt 'Read:\n\n{chunks}\n\n" in refused.err
    assert r"with --prompt 'Look at:\n" in refused.err
    assert "--prompt" in refused.err
    assert "no --prompt" in cli("ask", "alpha beta?").err


def test_a_variable_of_the_template_changes_the_prompt(cli: Cli, docs: Path, model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(model, own)
    template = (
        "{% if loud %}LOUD {% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if enable_thinking %}Think.{% endif %}"
    )
    config = json.loads((own / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    of = ("--model", str(own))
    statuses(cli, *of, "--template-var", "loud=true")
    plain, thinking = (
        ask(cli, *of, "--template-var", "loud=true", "--template-var", f"enable_thinking={value}")
        for value in ("false", "true")
    )
    assert plain["prompt_ids"] == thinking["prompt_ids"][: len(plain["prompt_ids"])] != thinking["prompt_ids"]
    refused = cli("ask", "alpha?", *of)
    assert "--template-var loud=true" in refused.err
    refused = cli("ask", "alpha?", *of, "--template-var", "louder=true")
    assert refused.code == 2
    assert "'louder'" in refused.err
    assert "enable_thinking, loud" in refused.err


def test_doctor_says_where_the_prompt_is_from(cli: Cli) -> None:
    own = cli("doctor", "--json").records[0]["model"]
    assert own["prompt"] == "the model's cacheblend_prompt.txt"
    (Path(own["path"]) / "cacheblend_prompt.txt").unlink()
    assert cli("doctor", "--json").records[0]["model"]["prompt"] == "default"


def test_where_the_settings_are_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    (tmp_path / "cacheblend.toml").write_text("prompt = 'p.txt'\ntemplate_var = ['a=1', 'b=x']\nsystem = 'Be terse.'\n")
    found = resolve({"template_var": []})
    assert found.settings.prompt == str(tmp_path / "p.txt")
    assert (found.settings.template_var, found.settings.system) == (("a=1", "b=x"), "Be terse.")
    monkeypatch.setenv("CACHEBLEND_TEMPLATE_VAR", "c=1, d=2")
    assert resolve({}).settings.template_var == ("c=1", "d=2")
    assert resolve({"template_var": ["e=1"]}).settings.template_var == ("e=1",)
    monkeypatch.delenv("CACHEBLEND_TEMPLATE_VAR")
    (tmp_path / "cacheblend.toml").write_text("template_var = 'a=1'\n")
    with pytest.raises(UsageError, match="template_var"):
        resolve({})
