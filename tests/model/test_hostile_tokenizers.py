"""A tokenizer.json that makes gigabytes of a sentence is refused before it is used; a panic in it is an error."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_tokenizer

from cacheblend_cli.errors import TextRefused, UsageError
from cacheblend_cli.model.text_encoder import checked
from cacheblend_cli.model.tokenizer import Tokenizer

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
NFKC = base64.b64encode((8).to_bytes(4, "little") + bytes(8) + b"x" * 33 + b"\0ab\0").decode()
WIDE = base64.b64encode((8).to_bytes(4, "little") + bytes(8) + b"x" * 999 + b"\0").decode()


def changed(folder: Path, **parts: Any) -> Tokenizer:
    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return Tokenizer(folder)


def sequence(*stages: Any, kind: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", kind: list(stages)}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence(*[DOUBLE] * 12)},
        {"normalizer": sequence(*[{"pattern": {"String": "a"}, "content": "aa"}] * 12)},  # the library reads this too
        {"normalizer": sequence(sequence(*[DOUBLE] * 3), sequence(*[DOUBLE] * 3))},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y" * 20}},
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "y" * 20}},
        {"normalizer": {"type": "Prepend", "prepend": "x" * 100}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": WIDE}},
        {"normalizer": sequence(*[DOUBLE] * 3), "pre_tokenizer": sequence(BYTES, BYTES, kind="pretokenizers")},
        {"pre_tokenizer": sequence(*[BYTES] * 6, kind="pretokenizers")},
        {"pre_tokenizer": sequence(*[METASPACE] * 6, kind="pretokenizers")},
        {"decoder": sequence(*[DOUBLE] * 12, kind="decoders")},
        {"decoder": sequence(*[{"type": "BPEDecoder", "suffix": ""}] * 12, kind="decoders")},
    ],
)
def test_a_text_does_not_grow_without_bound(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="can make a text more than 16 times as long") as refused:
        changed(tmp_path, **parts)
    assert str(tmp_path / "tokenizer.json") in refused.value.message
    assert refused.value.hint


def test_other_bombs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"have 1,00\d parts"):
        changed(tmp_path, normalizer=sequence(*[{"type": "NFC"}] * 1000))
    twice = [{"Sequence": {"id": "A", "type_id": 0}}] * 2
    template = {"type": "TemplateProcessing", "single": twice, "pair": [], "special_tokens": {}}
    with pytest.raises(UsageError, match="repeats a text"):
        changed(tmp_path, post_processor=template)
    special = {"<s>": {"id": "<s>", "ids": [1] * 1000, "tokens": ["<s>"] * 1000}}
    pieces = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 1000
    with pytest.raises(UsageError, match="too many tokens"):
        changed(tmp_path, post_processor={**template, "single": pieces, "special_tokens": special})


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence({"type": "Prepend", "prepend": "\u2581"}, MARK), "pre_tokenizer": None},  # Llama 2
        {"normalizer": MARK, "decoder": {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}},  # Gemma
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": sequence(BYTES, kind="pretokenizers"), "decoder": BYTES},
        {"normalizer": sequence(SPACES, {"type": "Lowercase"}), "pre_tokenizer": METASPACE},
        {"normalizer": sequence(*[{"type": "Replace", "pattern": {"String": "\u201c"}, "content": '"'}] * 20)},
    ],
)
def test_published_tokenizers_are_read(tmp_path: Path, parts: dict[str, Any]) -> None:
    assert changed(tmp_path, **parts).encode_text("Who leads billing?") is not None


def test_the_table_of_nfkc_is_no_bomb(tmp_path: Path) -> None:
    """Its longest replacement is 18 characters for one. The library reads no such table, and says so in a panic."""
    with pytest.raises(UsageError) as refused:
        changed(
            tmp_path, normalizer=sequence({"type": "Precompiled", "precompiled_charsmap": NFKC}, SPACES)
        ).encode_text("a")
    assert "times as long" not in refused.value.message


def test_a_panic_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a readable tokenizer") as refused:
        changed(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="})
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("length", [100, 10_000])
def test_a_panic_while_a_text_is_encoded_refuses_the_text(tmp_path: Path, length: int) -> None:
    slow = {"type": "Split", "pattern": {"Regex": "(a|aa)+c"}, "behavior": "Isolated", "invert": False}
    tokenizer = changed(tmp_path, pre_tokenizer=sequence(slow, BYTES, kind="pretokenizers"))
    with pytest.raises(TextRefused, match=r"cannot encode this text: .*retry-limit") as refused:
        tokenizer.encode_text("a" * length + "b")
    assert refused.value.hint
    assert tokenizer.encode_text("Who leads billing?")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_error_of_the_tokenizer(kind: type[BaseException]) -> None:
    with pytest.raises(kind), checked(lambda error: UsageError(str(error))):
        raise kind
