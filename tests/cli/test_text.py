"""Text as SentencePiece tokenizers have it, through the commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint
from text_tokenizers import write_text_tokenizer

from cacheblend_cli.collect import document_records
from cacheblend_cli.model.text_encoder import TextEncoder
from cacheblend_cli.model.tokenizer import Tokenizer

Cli = Callable[..., Any]
TEMPLATE = "{{ bos_token }}[INST] {{ messages[0]['content'] }} [/INST]"


@pytest.fixture
def sentence_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """A model with Llama 2's kind of tokenizer, named by the environment."""
    write_checkpoint(tmp_path / "piece", "llama-gqa", vocab_size=512, max_position_embeddings=2048)
    write_text_tokenizer(tmp_path / "piece", "llama2-legacy", TEMPLATE)
    monkeypatch.setenv("CACHEBLEND_MODEL", str(tmp_path / "piece"))
    return Tokenizer(tmp_path / "piece")


def test_chunks_with_other_ids_for_the_same_text_are_replaced(
    cli: Cli, docs: Path, sentence_piece: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of a version that put a space before every chunk."""
    encode = TextEncoder.encode
    with monkeypatch.context() as patched:
        patched.setattr(TextEncoder, "encode", lambda self, text: encode(self, " " + text))
        patched.setattr(document_records, "CUT_VERSION", 0)
        old = [r["id"] for r in cli("precompute", "docs", "--json").records]
    assert old
    new = cli("precompute", "docs", "--json").records
    assert {r["status"] for r in new} <= {"new", "replaced"}
    assert set(old).isdisjoint(r["id"] for r in new)
    assert {r["id"] for r in cli("chunks", "ls", "--json").records} == {r["id"] for r in new}


def test_the_prompt_reads_as_the_documents_do(cli: Cli, docs: Path, sentence_piece: Tokenizer) -> None:
    """No space before a chunk, nor before what follows them."""
    (docs / "alpha.md").write_text("# alpha\n\n- one\n    - two\n\nbilling\n")
    ids = cli("precompute", "docs/alpha.md", "--chunk-tokens", "12", "--json").records
    assert len(ids) > 1
    chosen = ",".join(r["id"] for r in ids)
    [answer] = cli("ask", "who leads?", "--chunks", chosen, "--ids", "--json", "--max-tokens", "2").records
    text = sentence_piece.decode(answer["prompt_ids"], skip_special_tokens=False)
    assert "Documents:\n\n# alpha\n\n- one\n    - two\n\nbilling\n\n\nQuestion: who leads? [/INST]" in text
