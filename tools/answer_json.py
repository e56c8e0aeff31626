"""The JSON form of an answer, as types: `ask --json`, and `blend` of HTTP responses.

`reference.py` writes docs/json.md and docs/ask.schema.json from them. A field's comment is its description in both.
"""

# no `from __future__ import annotations`: NotRequired needs evaluated annotations
import ast
import inspect
import json
import re
import textwrap
from dataclasses import is_dataclass
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from cacheblend_cli.types.answer import ChunkUse, Claim, Confirmation, FinishReason, Timing, Verification


class Logprob(TypedDict):
    """A token's log-probability, before penalties and temperature."""

    id: int  # token id
    logprob: float  # natural logarithm of its probability
    top: list[tuple[int, float]]  # likeliest tokens: [id, logprob]


class Layer(TypedDict):
    """One layer of a blended prefill."""

    layer: int  # number of the layer, from 0
    status: Literal["PREFILL", "CHECK", "AFTER_CHECK", "DECODE"]  # work of the layer, see architecture.md
    rows: int  # tokens that passed through the layer
    fresh: int  # reusable tokens whose KV or hidden state was computed at this layer


class Auto(TypedDict):
    """Decision of `--ratio auto`, and what came of it."""

    mode: Literal["blend", "full"]  # decision: blend at `ratio`, or a full prefill
    ratio: float  # share of the reused, inexact tokens that was recomputed
    floor: float  # lower bound of the ratio
    predicted_ttft_s: float  # predicted seconds to the first token
    ttft_s: float | None  # measured seconds to the first token
    predicted_full_ttft_s: float  # predicted seconds to the first token of a full prefill
    layer_recompute_s: float  # predicted seconds to recompute a layer
    layer_load_s: float  # predicted seconds to load a layer, which the one above is weighed against
    compute_s: float  # predicted seconds of computing, in all
    load_s: float  # predicted seconds of loading, in all
    stall_s: float  # predicted seconds in which computing waits for KV
    tier_bytes: NotRequired[int]  # bytes that come from a shared tier
    load_bytes_per_s: int | None  # speed of loading, null before the first measurement
    layer_s: float  # measured seconds per layer, whatever the number of rows
    row_s: float  # measured seconds per row and layer
    pair_s: float  # measured seconds per pair of row and key, and layer
    prefills_learnt_from: int  # number of prefills behind the speeds


class Tier(TypedDict):
    """Use of a shared tier by one prompt."""

    asked: int  # chunks without KV in the store
    found: int  # chunks that the tier has
    taken: int  # chunks loaded whole
    lost: int  # chunks found, but late, unreadable or damaged
    num_bytes: int  # bytes read
    seconds: float  # time from the first request to the last reply


class Reused(TypedDict):
    """How the prompt got its KV, in `ask --json` and in HTTP responses."""

    schema_version: int  # 1; raised when a field is removed or changes its meaning
    mode: str  # blend, full or reuse
    selector: str  # selector of the recomputed tokens
    ratio: float  # share of the reused, inexact tokens to recompute, as requested
    ratio_from: str  # origin of the ratio: given, auto, or model or default with the reason
    prompt_tokens: int  # tokens of the prompt
    cached_tokens: int  # prompt tokens with stored KV
    exact_tokens: int  # cached tokens whose KV is right as stored
    recomputed_tokens: int  # cached tokens that were recomputed
    recompute_fraction: float  # work done on the reusable tokens, as a share of computing all of them, 0 to 1
    accepted_tokens: int  # generated tokens that prompt lookup had proposed: they took no decode step of their own
    tokens_per_step: float  # generated tokens after the first, per decode step; 0 for an answer of one token
    kv_bytes_loaded: int  # bytes of stored KV that were read
    weak_match: bool  # even the best chunk found matches the question weakly
    claims: list[Claim]  # figures, names and quotations of the answer, looked up in the texts of the prompt
    hits_cut: int  # hits left out because they match far less well than the best one
    hits_repeated: int  # hits left out because a better one contains their text
    notes: list[str]  # messages for people; their wording may change
    prefix_cache_tokens: NotRequired[int]  # leading prompt tokens whose KV the engine still held
    auto: NotRequired[Auto]  # with --ratio auto
    verify: NotRequired[Verification]  # with --verify
    confirm: NotRequired[Confirmation]  # with --confirm, or --on-unsupported confirm if it was needed
    layers: NotRequired[list[Layer]]  # with --explain


class Answer(Reused):
    """The object of `ask --json`, and each line of `ask --batch`."""

    question: NotRequired[str]  # with --batch: the question
    asked_chunks: NotRequired[list[str]]  # with --batch: chunks that the question names
    answer: str  # text of the answer
    finish_reason: FinishReason  # why the answer ended
    model: str  # name of the model
    generated_tokens: int  # tokens of the answer and its reasoning
    chunks: list[ChunkUse]  # chunks, in the order of the prompt
    timing: Timing  # durations
    reasoning: NotRequired[str]  # text of the reasoning before the answer
    reasoning_tokens: NotRequired[int]  # tokens of the reasoning
    tier: NotRequired[Tier]  # with --tier, if the store lacked KV
    logprobs: NotRequired[list[Logprob]]  # with --logprobs: tokens of the answer
    prompt_logprobs: NotRequired[list[Logprob]]  # tokens of the prompt from the second on, if requested
    prompt_ids: NotRequired[list[int]]  # with --ids: token ids of the prompt
    generated_ids: NotRequired[list[int]]  # with --ids: token ids of the answer


class BlendChunk(TypedDict):
    """Use of one chunk of the prompt, in an HTTP response."""

    id: str  # content hash, hex
    document: str | None  # id of the document
    title: str | None  # title of the document
    tokens: int  # length
    status: Literal["exact", "blended", "computed"]  # as in ask --json
    recomputed: int  # tokens whose KV was computed in the last layers
    place: str  # page, slide or lines in the document
    rank: int | None  # rank in the search, from 1; null for a named chunk
    also_in: list[str]  # ids of other documents with the same text
    pieces: NotRequired[list[tuple[str, str]]]  # with explain: [text, exact|reused|recomputed|computed]


class BlendTiming(TypedDict):
    """Durations in seconds, as in `timing` of `ask --json`."""

    kv_load_s: float  # reading stored KV, mostly while layers are computed
    kv_load_stall_s: float  # part of the prefill in which computing waited for stored KV
    prefill_s: float  # prefill on the device, waits for KV included
    ttft_s: float  # from the known question to the first token
    decode_tokens_per_s: float  # tokens after the first, per second
    full_ttft_s: float | None  # estimated ttft_s of a full prefill, with ratio auto; null without


class Passage(TypedDict):
    """A passage that was found in a message."""

    id: str  # id in its tag
    title: str  # title in its tag
    message: int  # index in `messages`
    characters: int  # length of the text


class Blend(Reused):
    """`blend` of the responses of `/v1/chat/completions`, `/v1/completions`, `/api/chat` and `/api/generate`; a
    completion of several prompts has a list of them, `prompts`."""

    chunks: list[BlendChunk]  # chunks, in the order of the prompt
    timing: BlendTiming  # durations
    ended: str | None  # why the request ended early, else null
    passages: NotRequired[list[Passage]]  # with --find-passages


SECTIONS = (Answer, ChunkUse, Claim, Timing, Verification, Confirmation, Logprob, Layer, Auto, Tier, Blend, BlendChunk, BlendTiming, Passage)  # fmt: skip
_COMMENT = re.compile(r"^\s+(\w+): [^#]*#\s*(.+)$")


def descriptions(kind: type) -> dict[str, str]:
    """Return the comment beside each field of a class, and of `Reused` if the class extends it."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines, [body] = source.splitlines(), ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    found = {
        match[1]: match[2].replace("None", "null")
        for node in body.body
        if isinstance(node, ast.AnnAssign) and (match := _COMMENT.match(lines[node.lineno - 1]))
    }
    return found | descriptions(Reused) if kind in (Answer, Blend) else found


def schema() -> dict[str, Any]:
    """Return the JSON Schema: the object of `ask --json`, and under $defs/Blend that of HTTP responses."""
    (answer, _), parts = msgspec.json.schema_components((Answer, Blend), ref_template="#/$defs/{name}")
    for kind in SECTIONS:
        part, about = parts[kind.__name__], descriptions(kind)
        part["description"] = " ".join((inspect.getdoc(kind) or "").split())
        if is_dataclass(kind):  # vars() of it: each field is there
            part["required"] = list(part["properties"])
        fields = part["properties"]
        assert fields.keys() == about.keys(), (
            f"{kind.__name__}: a comment is missing beside {fields.keys() ^ about.keys()}"
        )
        part["properties"] = {name: {**fields[name], "description": about[name]} for name in about}
        for field in part["properties"].values():
            field.pop("default", None)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "cacheblend ask --json"}
    return {**head, **answer, "$defs": parts}


def schema_file() -> str:
    return json.dumps(schema(), indent=1) + "\n"


_HEAD = """# JSON of an answer

Fields of `ask --json` and of `blend` in HTTP responses, written by `python -m tools.reference`. The same as a JSON
Schema: [ask.schema.json](ask.schema.json). Names that end in `_s` are seconds. An optional field is absent unless it applies.

`schema_version` is raised when a field is removed or changes its meaning. New fields do not raise it: ignore those you
do not know. What a request may contain is in [serve.md](serve.md#openais-api) and at `/openapi.json`.
"""


def page() -> str:
    """Return docs/json.md."""
    parts, text = schema()["$defs"], _HEAD
    for kind in SECTIONS:
        part = parts[kind.__name__]
        rows = [
            f"| `{name}` | {_shown(field)} | {'' if name in part['required'] else 'optional: '}{_cell(field['description'])} |"
            for name, field in part["properties"].items()
        ]
        text += "\n".join(
            (
                "",
                f"## {kind.__name__}",
                "",
                part["description"],
                "",
                "| field | type | meaning |",
                "|---|---|---|",
                *rows,
                "",
            )
        )
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _shown(field: dict[str, Any]) -> str:
    """Return a field's type for readers."""
    if "anyOf" in field:
        return " or ".join(_shown(each) for each in field["anyOf"])
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        items = field.get("items")
        return f"list of {_shown(items)}" if items else "list"
    return {"number": "number", "integer": "integer", "string": "text", "boolean": "true or false"}.get(
        field["type"], field["type"]
    )
