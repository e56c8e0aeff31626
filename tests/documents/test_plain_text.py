"""Text that is only decoded: `data:` URIs, control sequences, and the messages for other encodings."""

from __future__ import annotations

import base64
import json
import random

import pytest
from cacheblend_documents.conversion import convert, convert_here
from cacheblend_documents.converted import NotConverted
from cacheblend_documents.json_records import from_json_records
from cacheblend_documents.plain_text import decoded

PICTURE = "data:image/png;base64," + base64.b64encode(random.Random(1).randbytes(60_000)).decode()


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("a.md", "one\n\n![chart]({})\n\ntwo\n"), ("a.css", "a {{ background: url('{}') }}\ntwo\n"), ("a.txt", "one {} two\n"),
        ("a.csv", "name,picture\nMara,{}\n"), ("a.json", '{{"one": "{}"}}'), ("a.svg", '<image href="{}"/>\n'),
    ],
)  # fmt: skip
def test_data_uris_become_their_type_in_every_kind_of_text(name: str, page: str) -> None:
    text = convert(name, page.format(PICTURE).encode()).text
    assert "data:image/png" in text
    assert len(text) < 100
    if name != "a.csv":
        assert text.rstrip("\n") == page.format("data:image/png").rstrip("\n"), "the lines stay"


def test_data_uris_of_notebooks_and_escaped_ones_are_shortened() -> None:
    notebook = {"nbformat": 4, "cells": [{"cell_type": "markdown", "source": [f"![x]({PICTURE})\n", "two"]}]}
    assert convert_here("a.ipynb", json.dumps(notebook).encode()).text == "![x](data:image/png)\ntwo\n\n"
    escaped = json.dumps({"a": PICTURE}).replace("/", "\\/")
    assert json.loads(decoded(escaped.encode())) == {"a": "data:image/png"}


@pytest.mark.parametrize(
    "text",
    [
        "data:image/png;base64,AAAA", "data:text/plain," + "a" * 200, "data: " + "a" * 200, "metadata:image/png " + "a" * 200,
        "data:image/png;base64," + "A" * 99,
    ],
)  # fmt: skip
def test_short_uris_and_other_text_stay(text: str) -> None:
    assert decoded(text.encode()) == text


def test_pictures_without_base64_are_shortened() -> None:
    assert decoded(b"url(data:image/svg+xml;utf8," + b"%3Csvg" * 50 + b") end") == "url(data:image/svg+xml) end"


def test_the_message_for_another_encoding_names_the_command() -> None:
    with pytest.raises(NotConverted) as refused:
        decoded("Straße 45".encode("latin-1"))
    assert refused.value.reason == "invalid UTF-8 at byte 4; convert it: iconv -f cp1252 -t utf-8 FILE"


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("\x1b[31mERROR\x1b[0m: \x1b[1;4mvalve\x1b[m \x1b[38;5;196mshut\x1b[K", "ERROR: valve shut"),
        ("\x1b]8;;https://a.example\x1b\\link\x1b]8;;\x07 \x1b]0;title\x07\x1b(Bend", "link end"),
        ("N\bNA\bAM\bME\bE _\bx", "NAME x"), ("cut \x1b[\nnext", "cut \nnext"),
    ],
)  # fmt: skip
def test_control_sequences_of_terminals_are_not_text(raw: str, text: str) -> None:
    assert decoded(raw.encode()) == text
    record = json.dumps([{"text": raw}]).encode()
    assert from_json_records(record).text.strip() == text.strip()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\u58f2\u4e0a 218\n".encode("iso2022_jp"), "iconv -f iso-2022-jp -t utf-8 FILE"),
        (b"-----BEGIN RSA PRIVATE KEY-----\nMIIB\n", "key"), (b"-----BEGIN PGP MESSAGE-----\n\nhQEM\n", "encrypted"),
    ],
)  # fmt: skip
def test_encoded_text_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(NotConverted, match=reason):
        decoded(text)


def test_a_signed_message_is_text() -> None:
    assert "Agreed" in decoded(b"-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\nAgreed.\n")
