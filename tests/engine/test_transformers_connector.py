"""Prompts prefilled here and continued by transformers: at ratio 1 its own answer, at others ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hub_families
import hub_models
import pytest
import torch
from hub_models import HubModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from cacheblend_cli import Engine
from cacheblend_cli.errors import UsageError

TEXTS = [
    "the lead of billing is Mara and she works in Bergen " * 2,
    "Jonas keeps a parrot at home near the harbor " * 2,
]
QUESTION, NEW = "where does Mara work?", 8
NAMES = ["qwen3", "gemma-3-4b", "gemma-3n-e4b", "glm-4-9b", "mistral, narrow window"]
MODELS = [model for model in (*hub_models.RUN, *hub_families.RUN) if model.name in NAMES]


def load(path: Path) -> tuple[Engine, Any]:
    """The engine and transformers' model, both in float32."""
    engine = Engine.load(str(path), dtype="float32", threads=1, prompt="{chunks}\n\n{question}", chunk_tokens=40)
    sees = "vision_config" in json.loads((path / "config.json").read_text())
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return engine, auto.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def generate(model: Any, inputs: dict[str, Any]) -> list[int]:
    ended = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(**inputs, max_new_tokens=NEW, **ended)
    return found[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("tested", MODELS, ids=lambda model: model.name)
def test_transformers_continues_from_the_kv(tested: HubModel, tmp_path: Path) -> None:
    tested.write(tmp_path)
    engine, model = load(tmp_path)
    with engine:
        engine.ask("who?", documents=TEXTS, max_tokens=1)
        whole = engine.prefill(QUESTION, documents=TEXTS, ratio=1.0)
        some = engine.prefill(QUESTION, documents=TEXTS, ratio=0.15)
        own = engine.ask(QUESTION, documents=TEXTS, ratio=0.15, max_tokens=NEW)
    ids = whole.input_ids
    full = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert generate(model, whole.inputs()) == full
    assert generate(model, whole.inputs(model)) == full, "a cache is not used up by another answer"
    assert whole.cache().get_seq_length() == ids.shape[1] - 1
    assert generate(model, some.inputs(model))[: len(own.generated_ids)] == own.generated_ids
    assert 0 < some.report.recomputed_tokens < whole.report.recomputed_tokens
    assert some.report.recomputed_tokens == own.recomputed_tokens
    assert some.report.cached_tokens == own.cached_tokens > 0
    assert some.report.finish_reason == "handed_over"
    assert some.report.generated_ids == []
    assert some.report.timing.ttft_s > 0


def test_what_compares_our_own_answer_is_refused(tmp_path: Path) -> None:
    MODELS[0].write(tmp_path)
    engine, _ = load(tmp_path)
    with engine:
        for wrong in ({"verify": True}, {"confirm": True}):
            with pytest.raises(UsageError):
                engine.prefill(QUESTION, documents=TEXTS, **wrong)
        assert engine.ask(QUESTION, max_tokens=2).text is not None
