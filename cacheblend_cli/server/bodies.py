"""Request bodies of all routes: OpenAI's fields and ours. Fields that would change the answer are supported or refused
by name.

msgspec decodes a body directly into these types: it stops at the first error and does not build skipped fields.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from cacheblend_cli.server.api_errors import ApiError, bad_request
from cacheblend_cli.settings.fields import REMOVED
from cacheblend_cli.types import MAX_STOP_CHARS, MAX_STOPS

MAX_DOCUMENTS = 1024
MAX_MESSAGES, MAX_PROMPTS = 4096, 256
MAX_SCHEMA_BYTES = 256 << 10
MAX_SCHEMA_DEPTH = 64

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Title = Annotated[str, Meta(max_length=1024)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Text = Annotated[str, Meta(min_length=1)]
Value = Annotated[str, Meta(max_length=1024)]
Hits = Annotated[int, Meta(ge=1, le=256)]
NULL: Any = msgspec.field(default_factory=lambda: Raw(b"null"))
"""Default of fields that are kept undecoded; the OpenAPI description shows no default."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"), "function_call": ("auto", "none"),
    "modalities": (["text"],), "audio": (), "reasoning_effort": (), "verbosity": ("medium",),
    "web_search_options": (), "moderation": (), "suffix": ("",),
    "no_stop_trim": (False,), "continue_final_message": (False,), "skip_special_tokens": (True,), "separate_reasoning": (True,),
    "stream_reasoning": (True,), "include_reasoning": (True,), "return_hidden_states": (False,),
}  # fmt: skip
"""Unsupported field of OpenAI or vllm-router -> values accepted because they have no effect (null always is)."""
_NO_CALLS = "must be auto or none, or be left out: this server answers with text and calls no tools"
_REASONS = {"tool_choice": _NO_CALLS, "function_call": _NO_CALLS}
"""Unsupported field -> end of the message that refuses it."""
_IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "prediction", "parallel_tool_calls",
)  # fmt: skip
"""OpenAI's fields that are accepted without effect."""


class DocumentIn(Struct, forbid_unknown_fields=True):
    """A document. id: its name in the response; title: heading before the text."""

    text: Text
    id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    title: Title | None = None


Documents = Annotated[list[DocumentIn | Text], Meta(max_length=MAX_DOCUMENTS)]
"""Documents of a request; a text alone is a document without id and title."""


class SearchIn(Struct, forbid_unknown_fields=True):
    """Search for stored chunks; true is the same as {}. query: default is the question; k: number of chunks."""

    query: str | None = None
    k: Hits | None = None


class BlendIn(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Use of stored KV. Omitted fields keep the server's settings. See `cacheblend ask --help`."""

    mode: Value | None = None
    ratio: float | Value | None = None
    selector: Value | None = None
    check_layer: Int | None = None
    correction: Value | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class SchemaIn(Struct):
    """A JSON schema in OpenAI's form."""

    schema: Raw = msgspec.field(default_factory=lambda: Raw(b"{}"))


class FormatIn(Struct, forbid_unknown_fields=True):
    """The form of the answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaIn | None = None

    @property
    def schema_text(self) -> str | None:
        """The JSON schema as text, None for plain text. Raises ApiError if it is missing, too large or too deep."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return '{"type": "object"}'
        place = "response_format.json_schema"
        if self.json_schema is None:
            raise bad_request(f"{place} is missing", place)
        raw = bytes(self.json_schema.schema)
        if len(raw) > MAX_SCHEMA_BYTES or _depth(raw) > MAX_SCHEMA_DEPTH:
            most = f"{MAX_SCHEMA_BYTES >> 10} KiB and {MAX_SCHEMA_DEPTH} levels"
            raise bad_request(f"{place}.schema exceeds {most}", f"{place}.schema")
        try:
            return json.dumps(msgspec.json.decode(raw, type=dict[str, Any]))
        except ValueError as error:
            raise bad_request(f"{place}.schema: {error}", f"{place}.schema") from error


class StreamOptions(Struct):
    """include_usage: end a stream with token counts."""

    include_usage: bool = False


class TextPart(Struct):
    """A text part of a message; other parts are refused."""

    type: Literal["text"]
    text: str


class Message(Struct):
    """A message of a conversation."""

    role: Annotated[str, Meta(extra_json_schema={"enum": ["system", "developer", "user", "assistant"]})]
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_MESSAGES)] | None = None
    tool_calls: Raw = NULL
    function_call: Raw = NULL

    @property
    def text(self) -> str | None:
        return "\n".join(part.text for part in self.content) if isinstance(self.content, list) else self.content

    @property
    def calls_tools(self) -> bool:
        return any(map(_is_given, (self.tool_calls, self.function_call)))


if TYPE_CHECKING:
    OtherFields = Struct
else:
    OtherFields = msgspec.defstruct("OtherFields", [(name, Raw, NULL) for name in (*_IGNORED, *_NEUTRAL)], kw_only=True)


class AskBody(OtherFields, forbid_unknown_fields=True, kw_only=True):
    """Fields of chat and text completions. verify: compare with a full prefill. explain: report on every token and
    layer. priority: lower values run first. timeout_s: end the answer after this many seconds."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    best_of: Annotated[int, Meta(ge=1, le=64)] | None = None
    stop_token_ids: Annotated[list[Int], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    stop_repetition: bool | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=4096)] | None = None
    response_format: FormatIn | None = None
    regex: Annotated[str, Meta(max_length=64 << 10)] | None = None
    documents: Documents | None = None
    chunks: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    search: SearchIn | bool | None = None
    blend: BlendIn | None = None
    verify: bool = False
    explain: bool = False
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    timeout_s: Annotated[float, Meta(gt=0)] | None = None

    # never called. The definitions stay out of the prompt: stored KV, which comes after them, would depend on them
    tools: Raw = NULL
    functions: Raw = NULL

    @property
    def given_documents(self) -> list[DocumentIn]:
        return [DocumentIn(given) if isinstance(given, str) else given for given in self.documents or ()]

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wanted_search(self) -> SearchIn | None:
        """The search that the request asks for; true is one with the defaults."""
        return (SearchIn() if self.search else None) if isinstance(self.search, bool) else self.search

    @property
    def lists_tools(self) -> bool:
        return any(map(_is_given, (self.tools, self.functions)))

    @property
    def wants_chunks(self) -> bool:
        return bool(self.documents or self.chunks or self.wanted_search is not None)


class ChatBody(AskBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    echo: Literal[False] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(AskBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions: continue a text without chat template. echo: repeat the prompt before the answer, with
    log-probabilities if requested; with max_tokens 0, return only the prompt."""

    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
    logprobs: TopLogprobs | None = None
    echo: bool = False
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class SearchBody(Struct, forbid_unknown_fields=True):
    """POST /v1/search."""

    query: Text
    k: Hits = 5


class PutBody(Struct, forbid_unknown_fields=True):
    """PUT /v1/documents/{id}."""

    text: Text
    title: Title | None = None


def _is_given(raw: Raw) -> bool:
    return bytes(raw) not in (b"null", b"[]")


Body = TypeVar("Body", bound=Struct)
_UNKNOWN = re.compile("Object contains unknown field `(.*)`", re.DOTALL)
_PLACED = re.compile(r"(.*) - at (?:`key` in )?`\$\.?([^`]*)`", re.DOTALL)


def parse(kind: type[Body], body: bytes) -> Body:
    """Decode and validate a body. Raises ApiError that names the first wrong field."""
    try:
        parsed = msgspec.json.decode(body.removeprefix(BOM_UTF8), type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if isinstance(parsed, AskBody):
        refuse_unsupported(parsed, _NEUTRAL)
    return parsed


def _refusal(message: str) -> ApiError:
    """Return msgspec's error with the field's name as OpenAI's `param`."""
    placed = _PLACED.fullmatch(message)
    what, path = placed.groups() if placed else (message, "")
    place = path.replace("[...]", "").replace("[", ".").replace("]", "").strip(".")  # messages[0].role: messages.0.role
    if unknown := _UNKNOWN.fullmatch(what):
        place = ".".join(part for part in (place, unknown[1]) if part)[:200]
        removed = REMOVED.get(place.removeprefix("blend.")) if place.startswith("blend.") else None
        message = f"the field {place!r} was removed: {removed}" if removed else f"unknown field {place!r}"
        return bad_request(message, place, "unknown_parameter")
    if missing := re.fullmatch("Object missing required field `(.*)`", what):
        place, what = ".".join(part for part in (place, missing[1]) if part), "the field is missing"
    return bad_request(f"{place or 'the body'}: {what[:1].lower()}{what[1:]}", place or None)


def refuse_unsupported(body: Struct, neutral_values: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ApiError if an unsupported field has a value with an effect."""
    for name, neutral in neutral_values.items():
        raw = bytes(getattr(body, name, b"null"))
        if raw != b"null" and (len(raw) > 64 or msgspec.json.decode(raw) not in neutral):
            message = f"{name} {_REASONS.get(name, 'is not supported')}"
            raise ApiError(400, message, param=name, code="unsupported_parameter")


def _depth(raw: bytes) -> int:
    depth = most = 0
    for bracket in re.sub(rb'"(?s:[^"\\]|\\.)*+(?:"|\\?\Z)|[^\[\]{}"]', b"", raw):
        depth += 1 if bracket in b"[{" else -1
        most = max(most, depth)
    return most
