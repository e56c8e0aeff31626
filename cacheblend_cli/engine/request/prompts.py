"""Prompts of a loaded model: templates, the collections whose chunks fit them, and the limits of the context."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from datetime import date

from cacheblend_store import ChunkStore
from cacheblend_store.format.blobs import CODECS, REMOVED

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.errors import PromptTooLong
from cacheblend_cli.model.description import ModelDescription
from cacheblend_cli.prompt import dates
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.records import kept_day
from cacheblend_cli.prompt.template import PromptTemplate, kept_template, split_template
from cacheblend_cli.prompt.wording import Wording
from cacheblend_cli.types import PLAIN, AskRequest, SamplingParams

CLOSING_ROOM = 24
"""Maximum number of tokens of the closing tags after reasoning, and of the text around them."""
_TEMPLATES = 64  # templates of other wordings and dates that are kept


class Prompts:
    """Templates and collections that requests are resolved with. Thread-safe: results depend on the arguments only,
    including the date that a template prints."""

    def __init__(self, model: ModelDescription, config: EngineConfig) -> None:
        self.model: ModelDescription = model
        self.config = config
        wording = Wording.of(model.path, config.prompt, config.system, config.template_var)
        self.template = kept_template(model.tokenizer, wording)
        self._templates: dict[tuple[str, date | None], PromptTemplate] = {}  # of other wordings and dates
        self._templates_lock = threading.Lock()

    def template_of(self, wording: Wording | None = None, day: date | None = None) -> PromptTemplate:
        """Return the template with this wording and date. None for either: the engine's own. A template that prints no
        date ignores `day`. Raises UsageError if the chat template cannot render the wording."""
        own = self.template
        wording, day = wording or own.wording, own.day and (day or own.day)
        if wording == own.wording and day == own.day:
            return own
        key = (json.dumps(wording.to_dict(), sort_keys=True), day)
        with self._templates_lock:
            if key not in self._templates:
                while len(self._templates) >= _TEMPLATES:
                    self._templates.pop(next(iter(self._templates)))
                split = kept_template if wording == own.wording else split_template  # none of requests is kept
                self._templates[key] = split(self.model.tokenizer, wording, day)
            return self._templates[key]

    def collection(
        self, salt: str = "", kv_dtype: str | None = None, wording: Wording | None = None, day: date | None = None
    ) -> Collection:
        """Return the collection whose keys depend on these values. kv_dtype, wording, day: None for the engine's."""
        return Collection.of(self.model, self.template_of(wording, day), kv_dtype or self.config.kv_dtype, salt)

    def collections(self, salt: str, day: date | None) -> list[Collection]:
        """Return the collections whose chunks can be used: one per codec, or the configured one; then collections of
        the same model in other dtypes. Of chunks in removed codecs, only the text can be used."""
        names = (*CODECS, *REMOVED) if self.config.kv_dtype == "auto" else (self.config.kv_dtype,)
        of = self.collection(salt, day=day)
        own = [of.in_codec(codec) for codec in names]
        return own + [other for collection in own for other in collection.in_other_dtypes()]

    def day(self, store: ChunkStore | None, salt: str = "") -> date | None:
        """Return the date for the template to print: the one that the store keeps for the salt, else today. None where
        the template prints no date."""
        if self.template.day is None:
            return None
        kept = kept_day(store, self.collection(salt)) if store is not None else None
        return kept or dates.today()

    def dated(self, store: ChunkStore | None, ask: AskRequest) -> AskRequest:
        """Return the request with its date, so that its whole preparation uses the same template."""
        return ask if ask.day is not None else replace(ask, day=self.day(store, ask.salt))

    def collection_of(self, ask: AskRequest) -> Collection:
        """Return the collection of a dated request: the engine's wording with the request's own prompts."""
        own = self.template.wording
        if ask.raw:
            wording = Wording(PLAIN, raw=True)
        else:
            system = own.system if ask.system is None else ask.system.strip()
            wording = replace(own, prompt=ask.prompt or own.prompt, system=system)
        return self.collection(ask.salt, wording=wording, day=ask.day)

    @property
    def context(self) -> int:
        """Maximum number of tokens of a prompt and its answer."""
        return self.model.spec.max_context

    def reasoning_budget(self, sampling: SamplingParams) -> int | None:
        """Return the number of reasoning tokens allowed in addition to the answer's; None if the model does not reason,
        or has no separate budget."""
        return sampling.reasoning_tokens if self.template.may_reason else None

    def max_new_tokens(self, sampling: SamplingParams) -> int:
        """Return the maximum number of tokens of an answer, with its reasoning."""
        budget = self.reasoning_budget(sampling)
        return sampling.max_tokens + (0 if budget is None else budget + CLOSING_ROOM)

    def check_characters(self, num_characters: int, headroom: int) -> None:
        """Raise PromptTooLong for texts that cannot fit the model's context, however they are tokenised. This is
        cheap, so it comes before all other work on a text."""
        if num_characters + headroom <= self.context:
            return
        least = num_characters // self.model.tokenizer.longest_token  # takes a while the first time
        if least + headroom > self.context:
            raise PromptTooLong(
                f"{num_characters:,} characters are at least {least:,} tokens; the context of {self.model.name} is {self.context}",
                "ask with fewer or shorter documents, or a shorter question",
            )

    def check_fits(self, num_tokens: int, sampling: SamplingParams) -> None:
        """Raise PromptTooLong if a prompt of num_tokens and its longest answer do not fit the model's context."""
        self.check_length(num_tokens, self.max_new_tokens(sampling))

    def check_length(self, num_tokens: int, headroom: int) -> None:
        """Raise PromptTooLong if a prompt and the answer's `headroom` do not fit the model's context."""
        if num_tokens + headroom > self.context:
            raise PromptTooLong(
                f"prompt ({num_tokens} tokens) and answer (up to {headroom}) exceed the context of {self.model.name} "
                f"({self.context} tokens)",
                "ask with fewer chunks, a shorter question or a smaller --max-tokens",
            )
