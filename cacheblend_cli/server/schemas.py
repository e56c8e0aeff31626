"""Types of the replies of /v1, for the API's description."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

Finish = Literal["stop", "length"]


class ErrorDetail(Struct):
    """message: for people. type: kind of error. param: the field that is wrong. code: for programs."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorReply(Struct):
    error: ErrorDetail


class OllamaError(Struct):
    """error: for people. code: for programs. param: the option or field that is wrong."""

    error: str
    param: str | None
    code: str | None


class Health(Struct):
    status: Literal["ok"]
    version: str


class Ready(Struct):
    status: Literal["ready", "stopping", "stuck"]


class Defaults(Struct):
    """Settings of a request that names none."""

    mode: str
    ratio: float | Literal["auto"]
    k: int
    max_tokens: int
    temperature: float


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    defaults: Defaults


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class Hit(Struct):
    """A chunk that was found. place: page or lines in its document, for people. score: higher is better."""

    id: str
    document: str
    title: str
    place: str
    index: int
    score: float
    snippet: str
    text: str


class HitList(Struct):
    object: Literal["list"]
    data: list[Hit]


class Document(Struct):
    """chunks: their ids. updated: seconds since 1970."""

    id: str
    object: Literal["document", "file"]
    title: str
    chunks: list[str]
    updated: int


class DocumentList(Struct):
    """suffixes: of the names of files that can be put. max_bytes: of one of them."""

    object: Literal["list"]
    data: list[Document]
    suffixes: list[str]
    max_bytes: int


class DocumentChunk(Struct):
    """place: page or lines in the file, for people. headings: titles it stands under, the outermost first."""

    id: str
    index: int
    place: str
    headings: list[str]
    text: str


class WholeDocument(Struct):
    """A document's chunks in order."""

    id: str
    object: Literal["document", "file"]
    title: str
    chunks: list[DocumentChunk]


class PutChunk(Struct):
    id: str
    tokens: int
    status: Literal["new", "unchanged"]


class PutReply(Struct):
    id: str
    object: Literal["document"]
    title: str
    chunks: list[PutChunk]


class Deleted(Struct):
    id: str
    object: Literal["document.deleted"]
    deleted: bool


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ReplyMessage(Struct):
    role: Literal["assistant"]
    content: str


class ChatChoice(Struct):
    index: int
    message: ReplyMessage
    finish_reason: Finish
    logprobs: dict[str, Any] | None


class ChatReply(Struct):
    """blend: what became of the chunks, and timing; see docs/serve.md."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    blend: dict[str, Any]


class CompletionChoice(Struct):
    index: int
    text: str
    finish_reason: Finish
    logprobs: dict[str, Any] | None


class CompletionReply(Struct):
    """blend: what became of the chunks, and timing; see docs/serve.md."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    blend: dict[str, Any]
