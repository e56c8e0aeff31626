"""The ids of prefix, chunks and suffix decode to what the template with the chunks in it renders, for every
tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_tokenizers import BYTE_KINDS, SCRIPTS, WORDS, text_tokenizer

from cacheblend_cli.corpus.chunker import iter_cut
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.prompt.template import PromptTemplate, split_template
from cacheblend_cli.prompt.wording import Wording

TEMPLATES = {
    "llama2": "{{ bos_token }}[INST] {{ messages[0]['content'] }} [/INST]",
    "zephyr": "<|user|>\n{{ messages[0]['content'] }}</s>\n<|assistant|>\n",
    "special-before-text": "{{ bos_token }}User{{ messages[0]['content'] }}</s>[INST]  Answer</s>",
}
LOSSLESS = ("byte-level", "gemma", "metaspace-first")
"""Those that write nothing between a control token and the text after it."""
PIECES = st.one_of(
    st.sampled_from([*SCRIPTS.values(), "    return 1\n", "\tx\n", "- item\n\n", " \n", "word", "a  b "]),
    st.text(alphabet="ab \n\t.\u4e2d\u2581\U0001f44d", min_size=1, max_size=12),
)
Make = Callable[[str, str], PromptTemplate]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("tokenizers")

    @cache
    def made(kind: str, template: str) -> PromptTemplate:
        return split_template(text_tokenizer(Path(folder) / f"{kind}-{template}", kind, TEMPLATES[template]))

    return made


def prompt_ids(template: PromptTemplate, chunks: list[str], question: str) -> list[int]:
    encode = template.tokenizer.encode_text
    return [*template.prefix_ids, *(i for c in chunks for i in encode(c)), *template.suffix_ids(question)]


def rendered(template: PromptTemplate, chunks: list[str], question: str) -> str:
    content = Wording().message("".join(chunks), question)
    return template.tokenizer.render([{"role": "user", "content": content}], datetime.now(), {}).text


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(chunks=st.lists(PIECES, max_size=4), question=st.sampled_from(["Who?", "a", "\u8c01\uff1f", "[INST] </s> who"]))
def test_the_ids_decode_to_the_rendered_text(
    make: Make, kind: str, template: str, chunks: list[str], question: str
) -> None:
    """Where the tokenizer writes a space after a control token, it does so in the prompt, and nowhere else."""
    parts = make(kind, template)
    ids, text = prompt_ids(parts, chunks, question), rendered(parts, chunks, question)
    if kind in LOSSLESS:
        assert decoded(parts.tokenizer, ids) == text.replace("\u2581", " " if kind != "byte-level" else "\u2581")
    if "</s>" not in question:  # which stays text here, and would be a control token in a prompt encoded as one
        whole = parts.tokenizer.encode_template(text)
        assert decoded(parts.tokenizer, ids) == decoded(parts.tokenizer, whole)


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_indentation_stays(make: Make, kind: str) -> None:
    parts = make(kind, "llama2")
    ids = prompt_ids(parts, ["Who:\n", "  Mara\n", "Bergen\n", " and"], "Who works?")
    expected = "\n\nWho:\n  Mara\nBergen\n and\n\nQuestion: Who works? [/INST]"
    assert expected in decoded(parts.tokenizer, ids)


def test_words_stand_as_they_stood_without_bytes_to_fall_back_to(make: Make) -> None:
    tokenizer = make("unigram-metaspace", "llama2").tokenizer
    ids = [i for c in ("Who:\n", "  Mara", "Bergen", " and") for i in tokenizer.encode_text(c)]
    assert decoded(tokenizer, [*tokenizer.encode_template("Jonas "), *ids]) == "Jonas Who:\n  MaraBergen and"


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(text=st.lists(PIECES, min_size=1, max_size=12).map("".join), size=st.integers(1, 40))
def test_the_chunks_of_a_document_join_to_its_text(make: Make, kind: str, text: str, size: int) -> None:
    """A chunk's ids are those of its text in the middle of the document, the first chunk's too."""
    tokenizer = make(kind, "llama2").tokenizer
    chunks = list(iter_cut(text, tokenizer.encode_text, size))
    assert all(list(c.token_ids) == tokenizer.encode_text(c.text) for c in chunks)
    before = tokenizer.encode_template("a")
    joined = decoded(tokenizer, [*before, *(i for c in chunks for i in c.token_ids)])
    kept = text if kind.startswith("byte-level") else text.replace("\u2581", " ")  # SentencePiece has one space
    assert joined == decoded(tokenizer, before) + kept


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_the_prompt_begins_as_the_whole_text_does(make: Make, kind: str) -> None:
    """The prefix is encoded as the tokenizer encodes the beginning of a prompt, and so is what follows a control
    token."""
    parts = make(kind, "zephyr")
    text = rendered(parts, [WORDS + "\n"], "Who?")
    whole, ids = parts.tokenizer.encode_template(text), prompt_ids(parts, [WORDS + "\n"], "Who?")
    assert ids[: len(parts.prefix_ids) - 1] == whole[: len(parts.prefix_ids) - 1]
    end = parts.tokenizer.token_id("</s>")
    assert ids[ids.index(end) :] == whole[whole.index(end) :]
