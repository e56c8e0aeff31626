"""Where the names of BOS and EOS stand: tokenizer_config.json, the older special_tokens_map.json, or both."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TEMPLATE, write_checkpoint, write_tokenizer
from transformers import PreTrainedTokenizerFast

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "who?"}]
DECODER = {"0": {"content": "<s>", "special": True}}


@pytest.mark.parametrize(
    ("config", "special"),
    [
        ({"bos_token": "<s>"}, None),
        ({}, {"bos_token": "<s>", "eos_token": "<|im_end|>"}),
        ({"bos_token": None}, {"bos_token": {"content": "<s>", "lstrip": False, "normalized": False}}),
        ({"bos_token": "<|im_start|>"}, {"bos_token": "<s>"}),
        ({"bos_token": "<s>", "added_tokens_decoder": DECODER}, {"bos_token": "<|im_start|>"}),
        ({"added_tokens_decoder": DECODER}, {"bos_token": "<s>"}),
    ],
)
def test_it_is_rendered_as_by_transformers(tmp_path: Path, config: dict[str, Any], special: Any) -> None:
    write_tokenizer(tmp_path)
    template = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token or '' }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    if special is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path)
    assert ours.render(MESSAGES, datetime.now(), {}).text == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert ours.special("bos_token") == theirs.bos_token


def test_a_model_whose_bos_stands_in_the_older_file_begins_its_prompts_with_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama-gqa")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    engine = Engine.load(EngineConfig(model=str(tmp_path)))
    assert engine.runtime.template.prefix_ids[0] == engine.model.tokenizer.token_id("<s>")


def test_a_special_token_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama-gqa")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": [1], "chat_template": TEMPLATE}))
    with pytest.raises(UsageError, match="bos_token"):
        Engine.load(EngineConfig(model=str(tmp_path)))
