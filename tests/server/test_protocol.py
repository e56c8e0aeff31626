"""Request bodies: the first error ends the check, names its field, and costs no more memory than the body."""

from __future__ import annotations

import tracemalloc

import pytest

from cacheblend_cli.server.api_errors import ApiError
from cacheblend_cli.server.bodies import AskBody, ChatBody, CompletionBody, FormatIn, SchemaIn, parse
from cacheblend_cli.server.preprocessing import read_messages

CHAT = b'{"messages": [{"role": "user", "content": "who?"}], %s}'
MANY = 200_000


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionBody, b'{"prompt": [' + b"{}," * MANY + b"{}]}", "prompt.0"),
        (ChatBody, CHAT % (b'"stop": [' + b"0," * MANY + b"0]"), "stop.0"),
        (ChatBody, CHAT % (b'"documents": [' + b"{}," * MANY + b"{}]"), "documents.0.text"),
        (ChatBody, CHAT % (b'"nothing": [' + b"[]," * MANY + b"[]]"), "nothing"),
        (ChatBody, CHAT % (b'"tool_choice": [' + b"[]," * MANY + b"[]]"), "tool_choice"),
    ],
)
def test_type_errors_cost_no_more_than_the_body(kind: type[AskBody], body: bytes, param: str) -> None:
    tracemalloc.start()
    with pytest.raises(ApiError) as refused:
        parse(kind, body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (refused.value.status, refused.value.param) == (400, param)
    assert peak < 2 * len(body) + (1 << 16)


@pytest.mark.parametrize(
    ("field", "param", "code"),
    [
        (b'"temperature": "hot"', "temperature", None),
        (b'"n": 0', "n", None),
        (b'"n": 100000000000000000000', "n", None),
        (b'"temprature": 1', "temprature", "unknown_parameter"),
        (b'"blend": {"rato": 1}', "blend.rato", "unknown_parameter"),
        (b'"blend": {"gradual": "1:0.3"}', "blend.gradual", "unknown_parameter"),
        (b'"documents": [{"text": "a"}, {"txt": "a"}]', "documents.1.txt", "unknown_parameter"),
        (b'"tool_choice": "required"', "tool_choice", "unsupported_parameter"),
        (b'"function_call": {"name": "f"}', "function_call", "unsupported_parameter"),
        (b'"echo": true', "echo", None),
        (b'"logit_bias": {"a": 1}', "logit_bias", None),
        (b'"stop": "' + b"z" * 100_000 + b'"', "stop", None),
        (b'"stop": [' + b'"a",' * 100 + b'"a"]', "stop", None),
        (b'"chunks": [' + b'"a",' * 5000 + b'"a"]', "chunks", None),
        (
            b'"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]',
            "messages.0.content.0.text",
            None,
        ),
        (b'"messages": [' + b'{"role": "user"},' * 5000 + b'{"role": "user"}]', "messages", None),
        (b'"user": ' + b"[" * 100_000 + b"]" * 100_000, None, None),
        (b'"seed": NaN', None, None),
    ],
    ids=lambda value: value[:24].decode() if isinstance(value, bytes) else "",
)
def test_the_first_error_names_its_field(field: bytes, param: str | None, code: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        parse(ChatBody, CHAT % field)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    "schema", [b'{"a":' * 100 + b"1" + b"}" * 100, b'{"a": "' + b"a" * 300_000 + b'"}', b"[1]", b'"a"']
)
def test_a_schema_is_bounded(schema: bytes) -> None:
    form = parse(FormatIn, b'{"type": "json_schema", "json_schema": {"schema": %s}}' % schema)
    with pytest.raises(ApiError) as refused:
        _ = form.schema_text
    assert refused.value.status == 400


def test_brackets_in_strings_do_not_nest() -> None:
    import msgspec

    form = FormatIn("json_schema", SchemaIn(msgspec.Raw(b'{"const": "' + b"[{" * 100 + b'\\""}')))
    assert form.schema_text is not None


def test_messages_of_one_role_are_joined() -> None:
    messages = parse(
        ChatBody, b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}'
    ).messages
    assert read_messages(messages).question == "a\n\nb"
