"""tokenizer.json and the chat template, without importing transformers (which costs two seconds)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import tokenizers

from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.model import template_process
from cacheblend_cli.model.model_files import AGAIN, LARGE_BYTES, is_there, read_bytes, read_object, read_text, text_of
from cacheblend_cli.model.template_process import Rendered
from cacheblend_cli.model.text_encoder import TextEncoder, checked, checked_ids, ids_of
from cacheblend_cli.model.tokenizer_json import (
    BYTE,
    Stage,
    check_growth,
    for_the_middle,
    is_control,
    sharing_model,
    stages_of,
    without_added,
)


@dataclass(frozen=True)
class _Stages:
    """A tokenizer.json as the library reads it, edited for the texts of a prompt."""

    whole: tokenizers.Tokenizer
    middle: tokenizers.Tokenizer  # encodes text that follows other text
    plain: tokenizers.Tokenizer  # `middle` without control tokens: `<|im_end|>` in a document is several pieces
    decoder: Stage | None
    control: Mapping[int, str]  # id -> control token
    added_ids: frozenset[int]
    special_ids: frozenset[int]

    @classmethod
    def of(cls, raw: str, template: str) -> _Stages:
        data = stages_of(raw)
        check_growth(data)
        whole = tokenizers.Tokenizer.from_str(raw)
        whole.no_truncation()
        whole.no_padding()
        added, model = data.get("added_tokens") or (), whole.model
        name, unknown_id = data["model"].get("unk_token"), data["model"].get("unk_id")
        # stands for unknown text: no forged control token
        unknown = {unknown_id if name is None else model.token_to_id(name)}
        control = {
            token["id"]: str(token["content"])
            for token in added
            if token["id"] not in unknown and is_control(token["content"], special=token["special"], template=template)
        }
        middle = for_the_middle(data)
        kept = without_added(added, control.keys() | unknown, model)
        return cls(
            whole,
            whole if middle is data else sharing_model(whole, middle, added),
            sharing_model(whole, middle, kept),
            data.get("decoder"),
            control,
            frozenset(token["id"] for token in added),
            frozenset(token["id"] for token in added if token["special"]),
        )


_STAGES = WeakValueDictionary[tuple[str, str], _Stages]()
"""Parsed tokenizers, shared by a model that was described and is loaded then."""


class Tokenizer:
    """A HF fast tokenizer. Text of documents and questions never yields a control token; text of the template may."""

    def __init__(self, model_dir: Path, num_embeddings: int | None = None, *, lazy: bool = False) -> None:
        """num_embeddings: the model's. A tokenizer may have more tokens (such as an added padding token); text that
        needs such a token is refused. lazy: parse tokenizer.json on first use, which takes a second for a vocabulary of
        262,144."""
        path = model_dir / "tokenizer.json"
        if not is_there(path):
            raise NotFoundError(
                f"{model_dir} has no tokenizer.json", "save the tokenizer with transformers' save_pretrained"
            )
        self.config = read_object(model_dir / "tokenizer_config.json")
        if "added_tokens_decoder" not in self.config:  # transformers reads the older file only in this case
            self.config |= read_object(model_dir / "special_tokens_map.json")
        self.template_source = self._find_template(model_dir)
        self._path, self._given_embeddings = path, num_embeddings
        self._content = read_bytes(path, LARGE_BYTES)
        self.fingerprint = hashlib.blake2b(self._content, digest_size=16).hexdigest()
        if not lazy:
            _ = self._stages

    @property
    def identity(self) -> tuple[object, ...]:
        """Files, settings and library versions that encoding, decoding and rendering depend on."""
        files = self.fingerprint, self.config, self.template_source, self._given_embeddings
        return (*files, tokenizers.__version__, metadata.version("jinja2"))

    @cached_property
    def _stages(self) -> _Stages:
        identity = self.fingerprint, self.template_source or ""
        if (stages := _STAGES.get(identity)) is None:
            raw = text_of(self._path, self._content)
            with checked(lambda error: UsageError(f"{self._path} is not a readable tokenizer: {error}", AGAIN)):
                stages = _STAGES[identity] = _Stages.of(raw, self.template_source or "")
        self._content = b""
        return stages

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return self._stages.whole

    @property
    def decoder(self) -> Stage | None:
        return self._stages.decoder

    @cached_property
    def _has_bytes(self) -> bool:
        return "ByteFallback" in json.dumps(self.decoder)

    @property
    def added_ids(self) -> frozenset[int]:
        return self._stages.added_ids

    @cached_property
    def control_ids(self) -> frozenset[int]:
        return frozenset(self._stages.control)

    @cached_property
    def _num_embeddings(self) -> int:
        return self.vocab_size if self._given_embeddings is None else self._given_embeddings

    @cached_property
    def text_encoder(self) -> TextEncoder:
        return TextEncoder(self._stages.plain, self._stages.control, self._num_embeddings)

    def to_json(self) -> str:
        """Return tokenizer.json as tokenizers writes it."""
        return str(self._tokenizer.to_str())

    @property
    def has_template(self) -> bool:
        return self.template_source is not None

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token. A text has at least len(text) / longest_token tokens."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @property
    def beginning(self) -> str:
        """Text that the tokenizer puts before any text, without a chat template: "" or a control token."""
        with checked(lambda error: UsageError(f"the tokenizer cannot begin a text: {error}", AGAIN)):
            ids = self._tokenizer.encode("").ids
        return self.decode([i for i in ids if str(self._tokenizer.id_to_token(i)) == self.special("bos_token")], False)

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a document's or question's text in the middle of a prompt.

        Adds no special tokens, matches no control tokens, and omits the mark or space that the tokenizer puts before a
        text on its own. Raises TextRefused for text that cannot be kept apart from a control token.
        """
        return self.text_encoder.encode(text)

    def encode_template(self, text: str) -> list[int]:
        """Return the ids of rendered template text from its start: control tokens are recognised, none are added."""
        return self._encode(self._tokenizer, text)

    def encode_template_rest(self, text: str) -> list[int]:
        """Encode template text that follows other text: the first run, up to a control token, as the middle of a text;
        later runs as text after a control token."""
        first = self._encode(self._stages.middle, text)
        whole = self.encode_template(text)
        return first[: self._first_control(first)] + whole[self._first_control(whole) :]

    def holds_control(self, text: str) -> bool:
        """Return whether the text would contain a control token if it were part of the template."""
        return not self.control_ids.isdisjoint(ids_of(self._tokenizer, text))

    def _encode(self, tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        return checked_ids(tokenizer, text, self._num_embeddings)

    def _first_control(self, ids: list[int]) -> int:
        return next((at for at, token_id in enumerate(ids) if token_id in self.control_ids), len(ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text by the tokenizer's decoder. `clean_up_tokenization_spaces` is ignored: it removes spaces that
        are in the ids ("a ? b"), so transformers does not apply it to BPE either."""
        with checked(lambda error: UsageError(f"the tokenizer cannot decode an answer: {error}", AGAIN)):
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def is_silent(self, token_id: int) -> bool:
        """Return whether `decode` skips the id: a special token, or not in the vocabulary (embeddings are padded)."""
        return token_id in self._stages.special_ids or self._tokenizer.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Return whether the id is one byte, such as <0x0A>, of a run that `decode` decodes as a whole."""
        return self._has_bytes and BYTE.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def knows(self, tag: str) -> bool:
        """Return whether the tag is a token, or occurs in the chat template."""
        return self.token_id(tag) is not None or tag in (self.template_source or "")

    def special(self, name: str) -> str | None:
        """Return the text of `bos_token`, `eos_token`, ... from tokenizer_config.json or special_tokens_map.json."""
        value = self.config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str | None):
            raise UsageError(f"{name} in the tokenizer's configuration must be a token, not {text!r}", AGAIN)
        return text

    def special_in(self, text: str) -> str | None:
        """Return the first special token that occurs in the text, or None."""
        ids = ids_of(self._tokenizer, text)
        found = next((i for i in ids if i in self._stages.special_ids and i in self.control_ids), None)
        return None if found is None else str(self._tokenizer.id_to_token(found))

    def render(self, messages: list[dict[str, str]], now: datetime, variables: Mapping[str, Any]) -> Rendered:
        """Render the chat template over the messages with the generation prompt. Without a template: bos and the plain
        content.

        now: the date that the template may print. variables: other variables of the template; enable_thinking defaults
        to False. Raises UsageError for a variable that the template does not have, and TemplateFailed.
        """
        if self.template_source is None:
            if variables:
                raise UsageError(
                    "the model has no chat template, so template variables have no effect", "leave them out"
                )
            return Rendered(
                (self.special("bos_token") or "") + "\n\n".join(m["content"] for m in messages) + "\n\nAnswer:"
            )
        tokens = {n: v for n in ("bos_token", "eos_token", "unk_token", "pad_token") if (v := self.special(n))}
        given = {"messages": messages, "add_generation_prompt": True, "tools": None, "documents": None, **tokens}
        return template_process.render(self.template_source, given, variables, now)

    def _find_template(self, model_dir: Path) -> str | None:
        file = model_dir / "chat_template.jinja"
        if is_there(file):
            return read_text(file)
        template = self.config.get("chat_template")
        if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
            named = {str(entry.get("name")): entry.get("template") for entry in template}
            template = named.get("default") or next(iter(named.values()), None)
        if not isinstance(template, str | None):
            raise UsageError(f"chat_template of {model_dir} is not a template: {str(template)[:60]}", AGAIN)
        return template
