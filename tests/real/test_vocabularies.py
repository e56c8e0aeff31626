"""llama.cpp's vocabularies: GGUF tokenizers give llama.cpp's ids for its test texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader
from real_packages import llama_cpp_models

from cacheblend_cli.model.gguf_files.architectures import ARCHITECTURES
from cacheblend_cli.model.gguf_files.tokenizer import write_tokenizer
from cacheblend_cli.model.tokenizer import Tokenizer

pytestmark = pytest.mark.real
NAMES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "phi-3"),
    *("qwen2", "qwen35", "refact", "starcoder"),
)
"""Those with test texts, but for BERT's, Falcon's and MPT's, which no GGUF file that is read here has."""
SPACE_PREFIX = ("llama-spm", "phi-3")


@pytest.mark.parametrize("name", NAMES)
def test_texts_get_the_ids_of_llama_cpp(name: str, tmp_path: Path) -> None:
    file = llama_cpp_models() / f"ggml-vocab-{name}.gguf"
    fields = GGUFReader(str(file)).fields
    metadata = {n: f.contents() if len(f.data) < 4096 else None for n, f in fields.items()}
    write_tokenizer(file, metadata, tmp_path)
    tokenizer = Tokenizer(tmp_path)
    texts = file.with_name(file.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = file.with_name(file.name + ".out").read_text().split("\n")
    assert len(texts) > 40
    for text, line in zip(texts, lines, strict=False):
        expected = [int(token_id) for token_id in line.split()]
        assert tokenizer.encode_template(text) == expected, text
        if name not in SPACE_PREFIX:  # left out in the middle of a prompt
            assert tokenizer.encode_text(text) == expected, text


def test_all_vocabularies_with_texts_are_looked_at() -> None:
    found = {
        file.name.removeprefix("ggml-vocab-").removesuffix(".gguf.inp") for file in llama_cpp_models().glob("*.inp")
    }
    left_out = found - set(NAMES)
    assert left_out == {"bert-bge", "falcon", "mpt"}
    assert left_out.isdisjoint(ARCHITECTURES)
