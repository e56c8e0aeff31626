"""What requests say: OpenAI's fields, and ours beside them. A field that would change the answer is done or refused by name."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cacheblend_cli.server.errors import ApiError, bad

MAX_DOCUMENTS = 1024
_IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "tool_choice", "parallel_tool_calls", "function_call",
}  # fmt: skip
"""Change no answer of ours, as long as there are no tools."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "functions": ([],), "modalities": (["text"],), "audio": (), "reasoning_effort": (), "verbosity": ("medium",),
    "web_search_options": (), "moderation": (), "echo": (False,), "suffix": ("",),
}  # fmt: skip
"""Fields of OpenAI's that are not done here, and the values that ask for nothing (None always does)."""


class DocumentIn(BaseModel):
    """A document. id: what it is called in the reply; title: stands before its text."""

    model_config = ConfigDict(extra="forbid")
    id: str | None = Field(None, min_length=1, max_length=256)
    title: str | None = Field(None, max_length=1024)
    text: str = Field(min_length=1)


class SearchIn(BaseModel):
    """Stored chunks to take. query: by default the question."""

    model_config = ConfigDict(extra="forbid")
    query: str | None = None
    k: int | None = Field(None, ge=1, le=256)


class BlendIn(BaseModel):
    """How the chunks' KV is used; what is left out is as the server was started. See `cacheblend ask --help`."""

    model_config = ConfigDict(extra="forbid")
    mode: str | None = None
    ratio: float | str | None = None
    ratio_floor: float | None = None
    selector: str | None = None
    deviation: str | None = None
    check_layer: int | None = None
    block: int | None = None
    nucleus: float | None = None
    gradual: str | None = None
    probe_layers: str | None = None
    draft_tokens: int | None = None
    correction: str | None = None
    max_risk: float | None = None


class SchemaIn(BaseModel):
    """A JSON schema in OpenAI's form."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class FormatIn(BaseModel):
    """What form the answer has: text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaIn | None = None

    @property
    def schema_text(self) -> str | None:
        """None for text. Raises ApiError where there is to be a schema and is none."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return '{"type": "object"}'
        if self.json_schema is None:
            raise bad("response_format.json_schema is missing", "response_format")
        return json.dumps(self.json_schema.schema_)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Asked(BaseModel):
    """What both ways of asking have. verify: compare with a full prefill. priority: lower is sooner. timeout_s: afterwards the
    answer ends."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=16)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    best_of: int | None = Field(None, ge=1, le=64)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    response_format: FormatIn | None = None
    regex: str | None = None
    documents: list[DocumentIn] | None = Field(None, max_length=MAX_DOCUMENTS)
    chunks: list[str] | None = Field(None, max_length=MAX_DOCUMENTS)
    search: SearchIn | None = None
    blend: BlendIn | None = None
    verify: bool = False
    explain: bool = False
    priority: int = Field(0, ge=-100, le=100)
    timeout_s: float | None = Field(None, gt=0)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_chunks(self) -> bool:
        return bool(self.documents or self.chunks or self.search is not None)


class ChatBody(Asked):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Asked):
    """POST /v1/completions: text that goes on, without a chat template. echo: the prompt stands before it, and logprobs are
    those of its tokens, too; max_tokens 0: of these alone."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    max_tokens: int | None = Field(None, ge=0)

    @property
    def prompts(self) -> list[str]:
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        texts = [text for text in given if isinstance(text, str)]
        if not texts or len(texts) < len(given):
            raise bad("the prompt is text here, not token ids", "prompt")
        return texts


class SearchBody(BaseModel):
    """POST /v1/search."""

    model_config = ConfigDict(extra="forbid")
    query: str = Field(min_length=1)
    k: int = Field(5, ge=1, le=256)


class PutBody(BaseModel):
    """PUT /v1/documents/{id}."""

    model_config = ConfigDict(extra="forbid")
    title: str | None = Field(None, max_length=1024)
    text: str = Field(min_length=1)


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], value: Any) -> Body:
    """Raises ApiError that names the field."""
    try:
        body = kind.model_validate(value, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise bad(f"{place or 'the body'}: {first['msg']}", place or None) from error
    for name, given in (body.model_extra or {}).items():
        _check_other(name, given)
    return body


def _check_other(name: str, value: Any) -> None:
    if value is None or name in _IGNORED:
        return
    if name not in _NEUTRAL:
        raise bad(f"unknown field {name!r}", name, "unknown_parameter")
    if value not in _NEUTRAL[name]:
        raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
