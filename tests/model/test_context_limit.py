"""The context: what RoPE's scaling makes of it, everywhere; and tokens that the model has no embedding for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint
from tokenizers import Tokenizer

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.errors import UsageError
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


def load(path: Path, **overrides: Any) -> Engine:
    write_checkpoint(path / "model", "llama-gqa", **overrides)
    return Engine.load(EngineConfig(prompt="{chunks}\n\n{question}", model=str(path / "model"), block_size=16))


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn"])
def test_prompts_go_past_the_length_before_scaling_and_not_past_the_one_behind_it(
    tmp_path: Path, rope_type: str
) -> None:
    engine = load(tmp_path, **rope(rope_type, factor=4.0), max_position_embeddings=64)
    assert engine.runtime.describe()["context"] == 256
    document = tmp_path / "d.md"
    document.write_text("\n\n".join(f"{' '.join(WORDS)} {p}." for p in range(8)))
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        engine.precompute(store, [str(document)], PrecomputeOptions(chunk_tokens=40), lambda event: None)
        keys = [m.key for m in sorted(store.chunks(), key=lambda m: m.index)]
        answer = engine.run_alone(store, AskRequest("who?", keys[:3], BlendParams(), SamplingParams(max_tokens=4)))
        assert 64 < answer.prompt_tokens <= 252
        with pytest.raises(UsageError, match="256"):
            engine.run_alone(store, AskRequest("who?", keys[:3], BlendParams(), SamplingParams(max_tokens=256)))
        room = 256 - len(engine.runtime.template.prefix_ids)
        with pytest.raises(UsageError, match=f"{room} tokens"):
            engine.precompute(store, [str(document)], PrecomputeOptions(chunk_tokens=room + 1), lambda event: None)


def test_left_context_is_as_wide_as_the_context(tmp_path: Path) -> None:
    engine = load(tmp_path, rope_parameters={"rope_theta": 10000.0, **YARN}, max_position_embeddings=64)
    assert engine.runtime.collection().window(10_000) == 256 - len(engine.runtime.template.prefix_ids)


def add_token(path: Path, text: str, template: str | None = None) -> None:
    """A token that the model has no embedding for, as Llama 2's padding token in many checkpoints."""
    file = str(path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens([f"<filler {n}>" for n in range(320 - tokenizer.get_vocab_size())] + [text])
    assert tokenizer.token_to_id(text) == 320
    tokenizer.save(file)
    if template is not None:
        config = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


def test_a_token_without_an_embedding_is_no_matter_until_a_text_needs_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "llama-gqa")
    add_token(tmp_path / "model", "<pad>")
    engine = Engine.load(EngineConfig(prompt="{chunks}\n\n{question}", model=str(tmp_path / "model"), block_size=16))
    question = AskRequest("is <pad> a word?", [], BlendParams(), SamplingParams(max_tokens=4))
    assert engine.run_alone(None, question).prompt_tokens > 5


def test_a_template_that_needs_a_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "llama-gqa")
    add_token(tmp_path / "model", "<turn>", "<turn>{{ messages[0]['content'] }}")
    with pytest.raises(UsageError, match=r"'<turn>'.* 320"):
        Engine.load(EngineConfig(prompt="{chunks}\n\n{question}", model=str(tmp_path / "model"), block_size=16))
