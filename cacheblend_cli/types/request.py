"""AskRequest: a question and everything that its answer depends on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import Resolved, Settings, of_settings
from cacheblend_cli.settings.sources import unknown_setting
from cacheblend_cli.types.blend import BlendParams
from cacheblend_cli.types.sampling import SamplingParams, model_sampled, sampling_of

PLAIN = "{chunks}{question}"
"""A prompt that does not mention documents."""


@dataclass(frozen=True)
class Scope:
    """Documents at or below a path, or matching a pattern; with neither, all documents except those sent with a request
    (see corpus/scopes.py: holds)."""

    path: str = ""  # a real path
    pattern: str = ""  # a real path with *, ? and [...], which match slashes too
    typed: str = ""  # the pattern as the user wrote it
    linked: frozenset[str] = frozenset()  # targets of links below the path


EVERYTHING = Scope()
NUM_HITS = 5
"""Chunks that a search returns at most, unless a number is given."""


@dataclass(frozen=True)
class SearchParams:
    """Search for chunks."""

    k: int = NUM_HITS  # number of chunks
    cut: bool = False  # leave out chunks whose match is far below the best one's (corpus/search.py: MAX_DROP)
    scope: Scope = EVERYTHING  # documents to search
    by: str = "auto"  # "words", "meaning", "both", or "auto": both if there are embedding weights
    embeddings: str = ""  # these weights, "" for the installed ones
    on_weak_match: str = "answer"  # or "refuse", to raise NotFoundError
    expand: int = 0  # chunks to add before and after each hit
    context: str = "document"  # the one to take of a document that is stored in several, see corpus/contexts.py
    query: str = ""  # text to search for, "" for the question
    optional: bool = False  # answer without chunks if nothing is found

    @classmethod
    def of(cls, settings: Settings, scope: Scope = EVERYTHING) -> SearchParams:
        """Return the settings' parameters. Hits far below the best are cut unless their number is set."""
        k, cut = settings.top_k or NUM_HITS, settings.top_k is None
        return of_settings(cls, settings, k=k, cut=cut, by=settings.search, scope=scope)


@dataclass(frozen=True)
class TextDocument:
    """A document that comes with a question."""

    text: str
    title: str | None = None
    id: str | None = None  # name on the wire


@dataclass(frozen=True)
class AskOptions:
    """Options of running a request and of its report."""

    verify: bool = False  # compare with a full prefill
    confirm: bool = False  # the answer is a full prefill's, after the blended one was streamed
    on_unsupported: str = "answer"  # or "confirm", "refuse": if a claim is not in the sources
    drafts: bool = True  # a draft may be streamed before it is confirmed
    auto: bool = False  # the loading controller chooses the ratio, at least `BlendParams.ratio`, or a full prefill
    own_ratio: bool = False  # the model's profile chooses ratio and correction, see engine/profile.py
    estimate_full: bool = False  # estimate the time of a full prefill; this machine is measured once
    save: bool = True  # store the KV of chunks that had to be computed, if the store is open for writing
    priority: int = 0  # lower runs first; among equals, in order of arrival
    deadline_s: float | None = None  # seconds from submission to the end, with finish_reason "deadline"
    ids: bool = False  # report token ids
    explain: bool = False  # report layers and the prompt's text
    tokens: bool = False  # report each token of the chunks

    def __post_init__(self) -> None:
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise UsageError(f"a deadline of {self.deadline_s:g} seconds has passed", "give a number above 0")


@dataclass(frozen=True)
class AskRequest:
    """A question, and everything that its answer depends on. The prompt has the chunks of its documents first, then
    named chunks, then search hits."""

    question: str
    keys: Sequence[bytes] = ()
    blend: BlendParams = field(default_factory=BlendParams)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    salt: str = ""  # separates the chunks of tenants
    history: tuple[str, ...] = ()  # earlier messages, of user and model in turn
    documents: tuple[TextDocument, ...] = ()  # cut and collected when they are first seen
    tenant: str = ""  # owner of these documents
    search: SearchParams | None = None  # None: no search
    system: str | None = None  # system prompt, None for the engine's
    prompt: str | None = None  # message with {chunks} and {question}, None for the engine's
    raw: bool = False  # no chat template
    day: date | None = None  # date that the template prints, None for the store's (see `Runtime.day`)
    model_sampling: tuple[str, ...] = ()  # fields of `sampling` that the model's generation_config.json decides
    options: AskOptions = AskOptions()
    cite_first: Scope | None = None  # documents to cite first if several have a chunk, None for the current project's

    def __post_init__(self) -> None:
        confirms = self.options.confirm or self.options.on_unsupported == "confirm"
        if confirms and max(self.sampling.n, self.sampling.best_of) > 1:
            raise UsageError("only one answer can be confirmed", "ask for one answer, or without confirming")

    @classmethod
    def of(cls, resolved: Resolved, question: str, sampling: SamplingParams | None = None, **others: Any) -> AskRequest:
        """Return a request by the settings. sampling: None for the settings'. others: further fields. Raises
        UsageError."""
        settings = resolved.settings
        options = replace(
            others.pop("options", AskOptions()),
            on_unsupported=settings.on_unsupported,
            auto=settings.ratio == "auto",
            own_ratio=settings.ratio == "model",
        )
        return cls(
            question,
            blend=BlendParams.of(settings),
            sampling=sampling_of(settings) if sampling is None else sampling,
            options=options,
            **{"salt": settings.salt, "model_sampling": model_sampled(resolved)} | others,
        )

    @property
    def wire(self) -> dict[str, Any]:
        """JSON form. A directory of embedding weights becomes an absolute path, since the engine may run in another
        directory."""
        record: dict[str, Any] = to_builtins(self)
        weights = self.search.embeddings if self.search else ""
        if weights and Path(weights).expanduser().is_dir():
            record["search"]["embeddings"] = os.path.abspath(Path(weights).expanduser())
        return record


def ask_request(
    resolved: Resolved,
    question: str,
    keys: Sequence[bytes] = (),
    *,
    documents: Sequence[str] = (),
    search: int = 0,
    history: Sequence[str] = (),
    verify: bool = False,
    **settings: Any,
) -> AskRequest:
    """Return a program's request. documents: texts to answer from. search: how many chunks to search for. history:
    earlier messages, of user and model in turn. settings: override `resolved`. Raises UsageError."""
    resolved = overridden(resolved, settings)
    return AskRequest.of(
        resolved,
        question,
        keys=keys,
        history=tuple(history),
        documents=tuple(TextDocument(text) for text in documents),
        search=SearchParams.of(replace(resolved.settings, top_k=search)) if search else None,
        prompt=None if documents or keys or search else PLAIN,
        options=AskOptions(verify=verify),
    )


def overridden(resolved: Resolved, given: dict[str, Any]) -> Resolved:
    """Return the settings with other values. Raises UsageError for an unknown setting."""
    if unknown := given.keys() - resolved.origin.keys():
        raise unknown_setting(min(unknown), "")
    return Resolved(replace(resolved.settings, **given), {**resolved.origin, **dict.fromkeys(given, "given")})
