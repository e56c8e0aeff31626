"""AnswerReport: the parts of a response that OpenAI's and Ollama's forms share."""

# no `from __future__ import annotations`: NotRequired needs evaluated annotations
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NotRequired, TypedDict

from cacheblend_cli.engine.events import Done
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.server.passages import MessagePassage
from cacheblend_cli.server.preprocessing import PreparedRequest
from cacheblend_cli.types import Answer, ChunkUse, TokenLogprob

REUSED = (
    "schema_version", "mode", "selector", "ratio", "ratio_from", "prompt_tokens", "cached_tokens", "exact_tokens", "recomputed_tokens",
    "recompute_fraction", "accepted_tokens", "tokens_per_step", "kv_bytes_loaded", "weak_match", "hits_cut", "hits_repeated",
    "notes", "claims", "prefix_cache_tokens", "verify", "confirm", "layers", "auto",
)  # fmt: skip
"""Keys of `Answer.to_dict` that a response has."""
OF_A_COMMAND = ("process_s", "model_load_s")
"""Durations that a response does not have."""


class BlendChunk(TypedDict):
    """Use of one chunk of the prompt, in an HTTP response."""

    id: str  # content hash, hex
    document: str | None  # id of the document
    title: str | None  # title of the document
    tokens: int  # length
    status: str  # exact, blended or computed, as in ask --json
    recomputed: int  # tokens whose KV was computed in the last layers
    place: str  # page, slide or lines in the document
    rank: int | None  # rank in the search, from 1; null for a named chunk
    also_in: Sequence[str]  # ids of other documents with the same text
    pieces: NotRequired[list[tuple[str, str]]]  # with explain: [text, exact|reused|recomputed|computed]


class Blend(TypedDict):
    """`blend` of the responses of `/v1/chat/completions`, `/v1/completions`, `/api/chat` and `/api/generate`; a
    completion of several prompts has a list of them, `prompts`."""

    chunks: list[BlendChunk]  # chunks, in the order of the prompt
    ended: str | None  # why the request ended early, else null
    passages: NotRequired[list[MessagePassage]]  # with --find-passages


@dataclass(frozen=True)
class AnswerReport:
    """Report on the use of chunks, "blend", and on log-probabilities."""

    tokenizer: Tokenizer
    public: Callable[[str], str]  # removes private paths from a note
    explain: bool = False  # report the use of each token
    passages: Sequence[MessagePassage] | None = None  # extracted from the messages; None if not looked for

    def blend(self, done: Done, prepared: PreparedRequest) -> dict[str, Any]:
        """Return the fields of `Blend` and REUSED, and the durations."""
        answer = done.answers[0]
        reported = answer.to_dict(explain=self.explain)
        chunks: list[BlendChunk] = [
            {
                "id": c.id, "document": origin.document, "title": origin.title, "tokens": c.tokens, "status": c.status,
                "recomputed": c.recomputed, "place": c.place, "rank": c.rank, "also_in": origin.also_in,
            }
            for c, origin in zip(answer.chunks, prepared.origins, strict=True)
        ]  # fmt: skip
        if self.explain:
            for record, chunk in zip(chunks, answer.chunks, strict=True):
                record["pieces"] = self._pieces(answer, chunk)
        return {
            **{name: reported[name] for name in REUSED if name in reported},
            "notes": [self.public(note) for note in reported["notes"]],
            "chunks": chunks,
            "timing": {name: value for name, value in reported["timing"].items() if name not in OF_A_COMMAND},
            "ended": done.ended,
            **({} if self.passages is None else {"passages": [vars(passage) for passage in self.passages]}),
        }

    def _pieces(self, answer: Answer, chunk: ChunkUse) -> list[tuple[str, str]]:
        """Return the chunk's text in runs of tokens of one kind: exact, reused, recomputed or computed."""
        at, pieces = chunk.start, list[tuple[str, str]]()
        for how, run in groupby(answer.kinds(chunk)):
            end = at + len(list(run))
            pieces.append((self.tokenizer.decode(answer.prompt_ids[at:end], skip_special_tokens=False), how))
            at = end
        return pieces

    def token(self, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, value) for token_id, value in logprob.top]
        return {**self._token(logprob.id, logprob.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

    def text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


def finish_reason(answer: Answer) -> str:
    """Return OpenAI's name: "length" also for an answer ended by its deadline, "stop" for one ended by repetition, so
    that clients do not ask for more."""
    return "stop" if answer.finish_reason in ("stop", "repetition") else "length"
