"""The chat template split into what stands before the chunks and what stands after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.tokenizer import TemplateFailed, Tokenizer
from cacheblend_cli.prompt.wording import Wording

CHUNKS = "Chunks5d1fe0b7Stand3c9aHere"  # survives templates that trim, and no document contains it
THINK, THOUGHT = "<think>", "</think>"
QUESTION = "Question8a44c1d2Stands0e6fHere"


@dataclass(frozen=True)
class PromptTemplate:
    """`prefix_ids` stand before the chunks; `suffix_ids(question)` after them. Special tokens come from the template alone.

    day: the date it prints, None for a template that prints none.
    """

    tokenizer: Tokenizer
    wording: Wording
    prefix_ids: tuple[int, ...]
    before_chunks: str
    before_question: str
    after_question: str
    day: date | None = None

    @property
    def opens_reasoning(self) -> bool:
        """Whether the answer begins within think tags, which the template has opened."""
        return self.after_question.rstrip().endswith(THINK)

    @property
    def may_reason(self) -> bool:
        """Whether the model may reason: think tags are known to it, and the template has not closed them already."""
        closed = self.after_question.rstrip().endswith(THOUGHT)
        return self.opens_reasoning or (any(map(self.tokenizer.knows, (THINK, THOUGHT))) and not closed)

    def on(self, day: date) -> PromptTemplate:
        """With another date."""
        return split_template(self.tokenizer, self.wording, day)

    def suffix_ids(self, question: str) -> tuple[int, ...]:
        """Ids of the question and all after it. Control tokens written in the question stay plain text.

        Raises UsageError when the question is empty.
        """
        question = question.strip()
        if not question:
            raise UsageError("the question is empty", 'write it as an argument: cacheblend ask "Who leads billing?"')
        encode = self.tokenizer.encode_template_rest
        if not self.tokenizer.holds_control(question):
            return tuple(encode(self.before_question + question + self.after_question))
        plain = self.tokenizer.encode_text(question)
        return (*encode(self.before_question), *plain, *encode(self.after_question))

    def differences(self, chunks: Sequence[str], question: str, prompt_ids: Sequence[int]) -> list[str]:
        """Where the prompt's ids decode to other text than the template renders with these chunks in it: in words, the first
        place where the tokenizer reads its own text otherwise, and the first where that comes from encoding it in parts."""
        rendered = self.before_chunks + "".join(chunks) + self.before_question + question.strip() + self.after_question
        decoded = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        if decoded == rendered:
            return []
        whole = self.tokenizer.decode(self.tokenizer.encode_template(rendered), skip_special_tokens=False)
        told = []
        if whole != rendered:
            read, written = _first_difference(whole, rendered)
            told.append(f"the tokenizer reads {read!r} where {written!r} is written, also when nothing is cut")
        if decoded != whole:
            read, written = _first_difference(decoded, whole)
            told.append(
                f"the prompt reads {read!r} where it is cut into chunks, and {written!r} when it is encoded as a whole"
            )
        return told


def _first_difference(a: str, b: str) -> tuple[str, str]:
    """What stands around the first difference, in each."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    around = slice(max(0, at - 12), at + 12)
    return a[around], b[around]


def split_template(tokenizer: Tokenizer, wording: Wording | None = None, day: date | None = None) -> PromptTemplate:
    """Render the chat template around sentinels and split it there. wording: None for the default one. day: the date to
    print, today's by default; the time is midnight.

    Raises UsageError when the template drops or repeats the user's message or the system prompt, or does not know a variable.
    """
    wording = wording or Wording()
    printed: set[date] = set()

    def strftime_now(form: str) -> str:
        printed.add(day or date.today())
        return datetime.combine(max(printed), time()).strftime(form)

    rendered = _render(tokenizer, wording, strftime_now)
    if rendered.count(CHUNKS) != 1 or rendered.count(QUESTION) != 1:
        raise UsageError(
            "the chat template does not render the user's message exactly once",
            "check chat_template in the model directory",
        )
    prefix, rest = rendered.split(CHUNKS)
    before, after = rest.split(QUESTION)
    return PromptTemplate(
        tokenizer, wording, tuple(tokenizer.encode_template(prefix)), prefix, before, after, max(printed, default=None)
    )


def _render(tokenizer: Tokenizer, wording: Wording, strftime_now: Callable[[str], str]) -> str:
    for flag, text in (("--system", wording.system), ("--prompt", wording.prompt)):
        if token := tokenizer.special_in(text):
            raise UsageError(f"{flag} has {token!r}, a control token of this model", "the chat template writes these")
    messages = [{"role": "user", "content": wording.message(CHUNKS, QUESTION)}]
    if not wording.system:
        return tokenizer.render(messages, strftime_now, wording.variables)
    to_do = "leave --system out, and write it into the file of --prompt"
    try:
        rendered = tokenizer.render(
            [{"role": "system", "content": wording.system}, *messages], strftime_now, wording.variables
        )
    except TemplateFailed as error:
        raise UsageError(f"the chat template takes no system prompt: {error.reason}", to_do) from error
    if rendered.count(wording.system) != 1:
        raise UsageError("the chat template does not render the system prompt exactly once", to_do)
    return rendered
