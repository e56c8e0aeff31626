"""Chat template, split at the chunks and the question."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import cached_property
from itertools import chain, count, zip_longest
from typing import NamedTuple

import msgspec

from cacheblend_cli import user_cache
from cacheblend_cli.errors import TemplateFailed, UsageError
from cacheblend_cli.model.template_process import Rendered
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.prompt.reasoning_tags import THINK, ReasoningTags, find_tags
from cacheblend_cli.prompt.wording import Wording
from cacheblend_cli.version import __version__

_ESCAPED = "\"5d1f\\n\n\n\t'<b>\u00e9</b>&"  # characters that JSON, HTML and other formats escape
CHANNEL = "<|channel|>"  # gpt-oss uses channels instead of tags: see `engine/core/detokenizer.py: Channels`


@dataclass(frozen=True)
class PromptTemplate:
    """Prefix ids before the chunks, and `suffix_ids(question)` after them. Only the template adds special tokens."""

    tokenizer: Tokenizer
    wording: Wording
    prefix_ids: tuple[int, ...]
    prefix_text: str  # of the ids
    before_chunks: str
    before_question: str
    after_question: str
    day: date | None = None  # date in the prefix, None for a template without one

    @property
    def _ending(self) -> str:
        return self.after_question.rstrip()

    @cached_property
    def reasoning_tags(self) -> ReasoningTags:
        """Tags around the model's reasoning.

        A model without tags gets `<think>`, because its answers do not begin with that.
        """
        return find_tags(self._ending, self.tokenizer.knows) or THINK

    @property
    def opens_reasoning(self) -> bool:
        """Return whether the template ends with an open reasoning tag."""
        return self._ending.endswith(self.reasoning_tags.open)

    @property
    def may_reason(self) -> bool:
        """Return whether the model can reason: it has reasoning tags, and the template does not close them."""
        knows, tags = self.tokenizer.knows, self.reasoning_tags
        closed = self._ending.endswith(tags.close)
        return self.opens_reasoning or (any(map(knows, (tags.open, tags.close, CHANNEL))) and not closed)

    def suffix_ids(self, question: str, history: Sequence[str] = ()) -> tuple[int, ...]:
        """Return the ids after the chunks: the question inside the template. Control tokens in the question stay plain
        text.

        history: earlier messages, alternating between user and model; the chunks are then in the first message. Raises
        UsageError if the question is empty or the chat template cannot render the history.
        """
        texts = [text if self.wording.raw else text.strip() for text in (*history, question)]
        if not texts[-1]:
            raise UsageError("the question is empty", 'write it as an argument: cacheblend ask "Who leads billing?"')
        around = self._around(len(texts)) if history else [self.before_question, self.after_question]
        pieces = [piece for piece in chain(*zip_longest(around, texts)) if piece is not None]
        encode = self.tokenizer.encode_template_rest
        if not any(map(self.tokenizer.holds_control, texts)):
            return tuple(encode("".join(pieces)))
        parts = (encode(p) if i % 2 == 0 else self.tokenizer.encode_text(p) for i, p in enumerate(pieces))
        return tuple(chain(*parts))

    def _around(self, count: int) -> list[str]:
        """Return the template text before, between and after `count` turns, starting after the chunks."""
        marks = Marks(self.wording)
        turns = [marks.turn(i) for i in range(count)]
        rendered = _render(self.tokenizer, self.wording, self.day or date.today(), marks, turns)
        before, _, rest = rendered.text.partition(marks.chunks)
        around = []
        for turn in turns:
            piece, found, rest = rest.partition(turn)
            around.append(piece)
            if not found or turn in rest or before != self.before_chunks:
                raise UsageError(
                    "the chat template does not render every turn of a conversation once, unchanged, after one prefix",
                    "ask without history",
                )
        return [*around, rest]

    def differences(self, chunks: Sequence[str], question: str, prompt_ids: Sequence[int]) -> list[str]:
        """Describe where the prompt's ids decode to text other than the rendered template.

        Covers the first place where the tokenizer does not round-trip, and the first that is due to encoding in parts.
        """
        rendered = self.before_chunks + "".join(chunks) + self.before_question + question.strip() + self.after_question
        decoded = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        if decoded == rendered:
            return []
        whole = self.tokenizer.decode(self.tokenizer.encode_template(rendered), skip_special_tokens=False)
        differences_found = []
        if whole != rendered:
            read, written = _first_difference(whole, rendered)
            differences_found.append(f"the tokenizer reads {written!r} as {read!r}, even without cutting")
        if decoded != whole:
            read, written = _first_difference(decoded, whole)
            differences_found.append(f"cut into chunks, the prompt reads {read!r}; encoded as a whole, {written!r}")
        return differences_found


def _first_difference(a: str, b: str) -> tuple[str, str]:
    """Return the text around the first difference, from each string."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    around = slice(max(0, at - 12), at + 12)
    return a[around], b[around]


class _Kept(NamedTuple):
    """A PromptTemplate without tokenizer and wording."""

    prefix_ids: tuple[int, ...]
    prefix_text: str
    before_chunks: str
    before_question: str
    after_question: str
    day: date | None


def kept_template(tokenizer: Tokenizer, wording: Wording, day: date | None = None) -> PromptTemplate:
    """Return `split_template`, from the user's cache if it is there. It then needs no vocabulary."""
    day = day or date.today()
    identity = __version__, *tokenizer.identity, wording.to_dict()
    for printed in (None, day):
        with suppress(ValueError):
            kept = msgspec.json.decode(user_cache.recall(user_cache.place("templates", *identity, printed)), type=_Kept)
            return PromptTemplate(tokenizer, wording, *kept)
    template = split_template(tokenizer, wording, day)
    kept = _Kept(*(getattr(template, name) for name in _Kept._fields))
    user_cache.keep(user_cache.place("templates", *identity, template.day), msgspec.json.encode(kept).decode())
    return template


def split_template(tokenizer: Tokenizer, wording: Wording | None = None, day: date | None = None) -> PromptTemplate:
    """Render the chat template with sentinels, and split it at these.

    wording: None for the default. day: date to print, by default today; the time is midnight. Raises UsageError if the
    template drops, repeats or escapes the user's message or the system prompt, or does not know a variable.
    """
    wording, day = wording or Wording(), day or date.today()
    marks = Marks(wording)
    question = marks.turn(0)
    rendered = _render(tokenizer, wording, day, marks, [question])
    if rendered.text.count(marks.chunks) != 1 or rendered.text.count(question) != 1:
        raise UsageError(
            "the chat template does not render the user's message exactly once, unchanged",
            "correct chat_template in the model directory: documents are put into its output as they are, so it must not drop, "
            "repeat, cut or escape (tojson) a message",
        )
    prefix, rest = rendered.text.split(marks.chunks)
    before, after = rest.split(question)
    ids, day_in_prefix = tuple(tokenizer.encode_template(prefix)), day if rendered.has_date else None
    return PromptTemplate(tokenizer, wording, ids, tokenizer.decode(ids, False), prefix, before, after, day_in_prefix)


class Marks:
    """Sentinels for texts in the chat template: words that survive trimming and do not occur in the wording. Those of
    chunks and turns also contain characters that escaping would change."""

    def __init__(self, wording: Wording) -> None:
        texts = f"{wording.system}\n{wording.prompt}\n{wording.variables}"
        ending = next(ending for n in count() if (ending := f"5d1fe0b7n{n}Stand3c9aHere") not in texts)
        self.chunks, self.system, self._turn = f"Chunks{_ESCAPED}{ending}", f"System{ending}", f"{_ESCAPED}{ending}"

    def turn(self, index: int) -> str:
        """Return the sentinel of a turn in the conversation. A single question has index 0."""
        return f"Turn{index:04}{self._turn}"


def _render(tokenizer: Tokenizer, wording: Wording, day: date, marks: Marks, turns: Sequence[str]) -> Rendered:
    """Render a conversation.

    day: date to print; the time is midnight. turns: texts alternating between user and model; the sentinel of the
    chunks goes into the first. Raises UsageError if the template repeats or drops the system prompt, or if --system or
    --prompt contains a control token.
    """
    if wording.raw:
        return Rendered(tokenizer.beginning + marks.chunks + "".join(turns))
    for flag, text in (("--system", wording.system), ("--prompt", wording.prompt)):
        if token := tokenizer.special_in(text):
            raise UsageError(
                f"{flag} has {token!r}, a control token of this model", "leave it out: the chat template adds them"
            )
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    messages[0]["content"] = wording.message(marks.chunks, turns[0])
    now = datetime.combine(day, time())
    if not wording.system:
        return tokenizer.render(messages, now, wording.variables)
    to_do = "leave --system out, and write it into the file of --prompt"

    def with_system(text: str) -> Rendered:
        try:
            return tokenizer.render([{"role": "system", "content": text}, *messages], now, wording.variables)
        except TemplateFailed as error:
            tokenizer.render(messages, now, wording.variables)  # raises if the failure has another cause
            raise UsageError(f"the chat template takes no system prompt: {error.reason}", to_do) from error

    # count a sentinel: the text itself may occur in the template
    if with_system(marks.system).text.count(marks.system) != 1:
        raise UsageError("the chat template does not render the system prompt exactly once", to_do)
    return with_system(wording.system)
