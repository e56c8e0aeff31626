"""JSON and JSON lines: records with all their fields, messages of chats, and lines that are not JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cacheblend_documents.conversion import convert_here
from cacheblend_documents.converted import Converted, NotConverted
from cacheblend_documents.json_records import from_json_lines, from_json_records

from cacheblend_cli.corpus.cutting import Locating


def of_lines(*records: Any) -> Converted:
    return from_json_lines("\n".join(map(json.dumps, records)).encode())


def of_value(value: Any) -> Converted:
    return from_json_records(json.dumps(value).encode())


def place_of(found: Converted, words: str) -> tuple[str, tuple[str, ...]]:
    start = found.text.index(words)
    place = Locating(found).find(start, start + len(words))
    return place.text, place.headings


def test_json_lines_are_records_with_their_lines() -> None:
    found = of_lines(
        {"id": 7, "title": "Travel", "text": "Within two weeks."}, {"id": "b", "text": "Alone."}, {"x": [1, 2]}
    )
    assert found.text == "# Travel\n\nid: 7\n\nWithin two weeks.\n\nid: b\n\nAlone.\n\nx: 1, 2\n\n"
    assert found.is_split
    assert place_of(found, "Within") == ("record 7, line 1", ("Travel",))
    assert place_of(found, "Alone")[0] == "record b, line 2"


def test_a_line_that_is_not_json_is_an_omission() -> None:
    found = from_json_lines(b'{"text":"The code is 4417."}\n{"text":"The door is red."}\n{"text":"Unfinish')
    assert found.text == "The code is 4417.\n\nThe door is red.\n\n"
    assert found.omissions == ("1 line is not JSON (line 3)",)
    found = from_json_lines(b"{\n[\n" + b"[" * 100_000 + b'\n{"text": "one"}\n')
    assert found.text == "one\n\n"
    assert found.omissions == ("2 lines are not JSON (lines 1, 2)", "1 line is nested too deeply (line 3)")


def test_lines_without_json_are_refused() -> None:
    with pytest.raises(NotConverted, match="2 lines are not JSON"):
        convert_here("a.jsonl", b"\n{\n[\n")


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"documents": rows}])
def test_json_with_records_is_these_and_other_json_is_text(wrap) -> None:  # type: ignore[no-untyped-def]
    found = of_value(wrap([{"text": "one"}, {"id": "x", "body": "two"}]))
    assert found.text == "one\n\nid: x\n\ntwo\n\n"
    assert [m.part for m in found.marks] == ["record 1", "record x"]
    plain = '{"a": {"b": 1},\n "text": 3}'
    assert from_json_records(plain.encode()).text == plain


def test_other_json_shows_escaped_letters_and_line_ends() -> None:
    found = from_json_records(b'{"a": {"name": "Gr\\u00f6\\u00dfe"}, "b": "one\\ntwo \\"C:\\\\new\\""}')
    assert found.text == '{"a": {"name": "Größe"}, "b": "one\ntwo "C:\\\\new""}'
    assert not found.keeps_lines


def test_records_keep_all_their_fields() -> None:
    record = {
        "number": 88, "state": "closed", "title": "Door code", "user": {"login": "mara", "org": {"name": "depot"}}, "labels": ["security", 2],
        "body": "The code is 4417.", "closed": True, "stock": 0, "due": None, "name": "code", "content": "more",
        "comments": [{"by": "jon", "text": "Changed."}, "loose"],
    }  # fmt: skip
    assert of_value(record).text == (
        "# Door code\n\nnumber: 88\nstate: closed\nuser.login: mara\nuser.org.name: depot\nlabels: security, 2\nbody: The code is 4417.\n"
        "closed: true\nstock: 0\nname: code\ncomments: by: jon, text: Changed.\ncomments: loose\n\nmore\n\n"
    )


def test_a_field_without_a_name_is_kept() -> None:
    assert of_lines({"": 5, "text": "one"}).text == ": 5\n\none\n\n"


def test_fields_around_records_are_kept() -> None:
    found = of_value(
        {
            "catalog": "Kitchen",
            "valid_until": "2026-12-31",
            "items": [{"name": "Kettle", "body": "Boils.", "price": 19}],
        }
    )
    assert found.text == "catalog: Kitchen\nvalid_until: 2026-12-31\n\n# Kettle\n\nprice: 19\n\nBoils.\n\n"
    assert [m.part for m in found.marks] == ["", "record 1"]


def test_a_chat_is_its_messages_and_is_not_cut_at_each() -> None:
    parts = [{"type": "text", "text": "On 17 April."}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    messages = [
        {"role": "user", "name": "Mara", "content": "When?", "at": "09:30"},
        {"role": "assistant", "content": parts},
    ]
    text = 'Mara (user): When?\nat: 09:30\n\nassistant: On 17 April.\n{"type": "image_url", "image_url": {"url": "a.png"}}\n\n'
    found = of_value({"model": "small", "messages": messages})
    assert (found.text, found.is_split) == ("model: small\n\n" + text, False)
    assert place_of(found, "When")[0] == "message 1"
    assert of_lines({"messages": messages}).text == text.replace("\n\nassistant", "\nassistant")


def test_fields_of_deep_objects_stay_short() -> None:
    value: Any = "end"
    for _ in range(200):
        value = {"k" * 500: value}
    assert len(of_lines({"text": "x", "deep": value}).text) < 200 * 500 * 2


TELEGRAM = {
    "name": "Garden club",
    "about": ["loose"],
    "messages": [
        {"id": 1, "type": "service", "date": "2025-03-01T09:00:00", "actor": "Ida", "title": "Garden club", "text": ""},
        {
            "id": 2, "type": "message", "date": "2025-03-01T09:06:40", "from": "Olav", "reply_to": 1,
            "text": ["Pay to ", {"type": "bold", "text": "account 9912"}, " by 14 March."],
            "text_entities": [{"type": "plain", "text": "Pay to "}, {"type": "bold", "text": "account 9912"}],
        },
        "left out",
    ],
}  # fmt: skip


def test_one_record_of_another_form_does_not_decide_for_all() -> None:
    found = of_value(TELEGRAM)
    assert found.text == (
        "name: Garden club\nabout: loose\n\nid: 1\ntype: service\ndate: 2025-03-01T09:00:00\nactor: Ida\ntitle: Garden club\n\n"
        "Olav: Pay to account 9912 by 14 March.\ndate: 2025-03-01T09:06:40\nid: 2\nreply_to: 1\n\nleft out\n\n"
    )
    assert not found.is_split
    tools = {"role": "assistant", "tool_calls": [{"id": "a"}]}
    assert of_value([{"role": "user", "content": "When?"}, tools]).text == (
        "user: When?\n\nrole: assistant\ntool_calls: id: a\n\n"
    )
    assert of_value([{"id": 7}, {"id": 8, "body": "Wide."}]).text == "id: 7\n\nid: 8\n\nWide.\n\n"


def test_messages_of_slack_have_names_and_times_that_the_file_has() -> None:
    message = {
        "type": "message", "user": "U02", "ts": "1748941260.000200", "user_profile": {"real_name": "Tor Berg", "image": "x"},
        "text": "Set it to 68 &amp; restart, see <https://a.example/b|the manual>, <@U01> <#C1|ops> <!here> <mailto:a@b.c|a@b.c> <https://c.d>",
        "blocks": [{"elements": [{"text": "Set it"}]}],
    }  # fmt: skip
    text = "Set it to 68 & restart, see the manual (https://a.example/b), @U01 #ops @here a@b.c https://c.d\ndate: 2025-06-03 09:01 UTC\n\n"
    assert of_value([message]).text == f"Tor Berg: {text}"
    del message["user_profile"]
    assert of_value([message]).text == f"U02: {text}"


def test_letters_and_reviews_are_records() -> None:
    letter = {"from": "Ida", "to": "Olav", "date": "2025-03-01", "text": "It is 318."}
    assert of_value([letter]).text == "from: Ida\nto: Olav\ndate: 2025-03-01\n\nIt is 318.\n\n"
    assert of_value([{"user": "Ida", "stars": 5, "text": "Good."}]).text == "user: Ida\nstars: 5\n\nGood.\n\n"


@pytest.mark.parametrize("convert", [from_json_records, from_json_lines])
def test_text_whose_utf_8_was_read_as_latin_1_is_repaired(convert: Any) -> None:
    wrong = "Grüße, 5 € 😀".encode().decode("latin-1")
    message = {"sender_name": "Zoë".encode().decode("latin-1"), "timestamp_ms": 1748941260000, "content": wrong}
    chat = {"participants": [{"name": "A"}], "messages": [message, {"sender_name": "A", "timestamp_ms": 1}]}
    text = convert(json.dumps(chat).encode()).text
    assert "Zoë: Grüße, 5 € 😀\ndate: 2025-06-03 09:01 UTC" in text
    mixed = [{"text": "Â is a letter, and so is ü"}, {"text": wrong}]
    assert from_json_records(json.dumps(mixed).encode()).text == f"Â is a letter, and so is ü\n\n{wrong}\n\n"
