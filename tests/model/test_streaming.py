"""Streaming decode: whatever the tokenizer and the split into steps, the pieces joined are one decode of all ids."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_tokenizers import BYTE_KINDS, KINDS, SCRIPTS, text_tokenizer

from cacheblend_cli.model.text_stream import TextStream
from cacheblend_cli.model.tokenizer import Tokenizer

Make = Callable[[str], Tokenizer]
kinds = pytest.mark.parametrize("kind", KINDS)
TEXTS = st.one_of(
    st.lists(st.sampled_from([*SCRIPTS.values(), " ", "  ", "\n", "\ufffd", "is", "a"]), max_size=6).map("".join),
    st.text(alphabet="".join(sorted(set("".join(SCRIPTS.values())))), max_size=30),
    st.text(max_size=20),
)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("tokenizers")

    @cache
    def made(kind: str) -> Tokenizer:
        return text_tokenizer(Path(folder) / kind, kind)

    return made


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@kinds
@given(text=TEXTS)
def test_streamed_text_is_one_decode(make: Make, kind: str, text: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode_text(text)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@kinds
@given(data=st.data())
def test_streamed_ids_are_one_decode(make: Make, kind: str, data: st.DataObject) -> None:
    """Ids as a random model draws them: control tokens, cut characters, ids beyond the vocabulary; byte tokens
    often."""
    tokenizer = make(kind)
    size = tokenizer.vocab_size
    tokens = st.one_of(st.integers(0, size + 3), st.integers(max(0, size - 256), size - 1), st.integers(0, 5))
    ids = data.draw(st.lists(tokens, max_size=40))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_no_character_is_cut_and_none_is_late(make: Make, kind: str, script: str) -> None:
    """No piece holds half a character, and what is shown lags by one character or, of bytes that are decoded as a
    whole, by the run of them."""
    tokenizer, text = make(kind), (SCRIPTS[script] + " and\n") * 3
    ids = tokenizer.encode_text(text)
    stream, shown = TextStream(tokenizer), ""
    for count, token_id in enumerate(ids, 1):
        shown += stream.push(token_id)
        assert "\ufffd" not in shown
        if not tokenizer.is_byte(token_id):
            assert tokenizer.decode(ids[:count]).rstrip("\ufffd") == shown
    assert shown + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "odd-decoder"])
def test_a_step_looks_at_a_few_ids_however_long_the_answer_is(
    make: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode_text(" ".join(SCRIPTS.values())) * 20
    looked, decode = 0, tokenizer.decode

    def counted(some: list[int]) -> str:
        nonlocal looked
        looked += len(some)
        return decode(some)

    monkeypatch.setattr(tokenizer, "decode", counted)
    assert "".join(streamed(tokenizer, ids)) == decode(ids)
    assert looked <= 12 * len(ids)


@kinds
def test_what_is_held_back_is_seen_before_the_end(make: Make, kind: str) -> None:
    """A stop string in it ends the answer without one more token."""
    tokenizer = make(kind)
    ids = tokenizer.encode_text("a\u8c01\n \U0001f44d")
    stream, shown = TextStream(tokenizer), ""
    for count, token_id in enumerate(ids, 1):
        shown += stream.push(token_id)
        assert shown + stream.held() == tokenizer.decode(ids[:count])
