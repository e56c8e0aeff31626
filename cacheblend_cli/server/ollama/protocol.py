"""Request bodies of Ollama's API and their translation to /v1. Fields that would change the answer are supported or
refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Raw, Struct, defstruct

from cacheblend_cli.server.api_errors import ApiError, bad_request
from cacheblend_cli.server.bodies import (
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    NULL,
    AskBody,
    BlendIn,
    Count,
    Documents,
    FormatIn,
    Int,
    Message,
    SchemaIn,
    SearchIn,
    Stop,
    TopLogprobs,
    refuse_unsupported,
)
from cacheblend_cli.server.embedding_routes import MAX_TEXTS
from cacheblend_cli.types import MAX_STOPS

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "images": ([],), "suffix": ("",), "template": ("",), "context": ([],), "width": (0,), "height": (0,), "steps": (0,),
}  # fmt: skip
"""Unsupported field of Ollama -> values accepted because they have no effect (null always is)."""

OPTIONS = {
    **{name: name for name in ("seed", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")},
    "max_tokens": "num_predict", "repetition_penalty": "repeat_penalty",
}  # fmt: skip
"""Field of AskBody -> Ollama's option with the same meaning."""


_WITHOUT_EFFECT = {
    Int: ("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "repeat_last_n", "mirostat"),
    bool: (
        "numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "penalize_newline",
    ),
    float: ("typical_p", "tfs_z", "mirostat_tau", "mirostat_eta"),
}  # fmt: skip
"""Type -> options of how to load the model, which is already loaded, and those that `OptionsIn.check` refuses if they
would have an effect."""
if TYPE_CHECKING:
    OtherOptions = Struct
else:
    fields = [(name, kind | None, None) for kind, names in _WITHOUT_EFFECT.items() for name in names]
    OtherOptions = defstruct("OtherOptions", fields, kw_only=True)


class OptionsIn(OtherOptions, forbid_unknown_fields=True, kw_only=True):
    """Ollama's options. num_predict below 0: the server's limit."""

    seed: Int | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None

    def check(self) -> None:
        """Raises ApiError for an option that would change the answer and is not supported."""
        penalises = self.repeat_penalty not in (None, 1) or self.presence_penalty or self.frequency_penalty
        neutral: dict[str, float] = {"typical_p": 1, "tfs_z": 1, "mirostat": 0}
        if penalises:  # penalties here count the whole text
            neutral |= {"repeat_last_n": -1, "penalize_newline": True}
        for name, value in neutral.items():
            if getattr(self, name) not in (None, value):
                place = f"options.{name}"
                raise bad_request(f"{place} {getattr(self, name)} is not supported", place, "unsupported_parameter")

    @property
    def ask_fields(self) -> dict[str, Any]:
        """Return the options as fields of AskBody."""
        given = {field: getattr(self, option) for field, option in OPTIONS.items()}
        limit = self.num_predict
        return given | {"max_tokens": None if limit is None or limit < 0 else max(1, limit)}


class LoadBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Common fields. keep_alive: without effect because the model stays loaded."""

    model: str
    keep_alive: float | str | None = None
    options: OptionsIn | None = None

    def check(self) -> None:
        """Raises ApiError."""
        if self.options is not None:
            self.options.check()


class AnswerBody(LoadBody, forbid_unknown_fields=True, kw_only=True):
    """Fields of /api/chat and /api/generate, with our documents, chunks, search and blend.

    format: "json" or a JSON schema. think: False skips reasoning.
    """

    stream: bool | None = None
    format: Raw = NULL
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    documents: Documents | None = None
    chunks: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    search: SearchIn | bool | None = None
    blend: BlendIn | None = None

    # accepted without effect: prompts that are too long are refused
    truncate: bool | None = None
    shift: bool | None = None

    # never called, see AskBody
    tools: Raw = NULL

    # refused unless they have no effect: see _NEUTRAL
    images: Raw = NULL

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def ask_body(self) -> AskBody:
        """Return the request in the form of /v1. Raises ApiError for unsupported fields."""
        self.check()
        refuse_unsupported(self, _NEUTRAL)
        if isinstance(self.think, str):
            raise bad_request("think must be true or false; levels are not supported", "think", "unsupported_parameter")
        return AskBody(
            stream=self.stream is not False,
            response_format=_format(bytes(self.format)),
            documents=self.documents,
            chunks=self.chunks,
            search=self.search,
            blend=self.blend,
            tools=self.tools,
            **(self.options.ask_fields if self.options else {}),
        )


class ChatMessage(Message):
    """A message with Ollama's extra fields. thinking of earlier turns is ignored."""

    thinking: str | None = None
    tool_name: str | None = None
    images: Raw = NULL


class OllamaChatBody(AnswerBody, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat. Without messages: report whether the model is loaded."""

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None

    def ask_body(self) -> AskBody:
        for i, message in enumerate(self.messages or ()):
            if bytes(message.images) not in (b"null", b"[]"):
                place = f"messages.{i}.images"
                raise ApiError(400, "images are not supported", param=place, code="unsupported_parameter")
        return super().ask_body()


class GenerateBody(AnswerBody, forbid_unknown_fields=True, kw_only=True):
    """POST /api/generate. raw: no chat template. Without a prompt: report whether the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Raw = NULL
    template: Raw = NULL
    context: Raw = NULL
    width: Raw = NULL
    height: Raw = NULL
    steps: Raw = NULL


class ShowBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/show. name: older name of the field model. verbose: accepted without effect."""

    model: str = ""
    name: str = ""
    verbose: bool | None = None


class OllamaEmbedBody(LoadBody, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embed. truncate: False refuses texts that are too long."""

    input: str | Annotated[list[str], Meta(max_length=MAX_TEXTS)]
    truncate: bool | None = None
    dimensions: Count | None = None


class OldEmbedBody(LoadBody, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embeddings, the older form for one text."""

    prompt: str | None = None


def _format(raw: bytes) -> FormatIn | None:
    """Parse format: "json" or a JSON schema. Raises ApiError."""
    if raw in (b"null", b'""'):
        return None
    if raw == b'"json"':
        return FormatIn("json_object")
    if not raw.startswith(b"{"):
        raise bad_request('format must be "json" or a JSON schema', "format")
    return FormatIn("json_schema", SchemaIn(Raw(raw)))
