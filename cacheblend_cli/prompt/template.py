"""The chat template split into what stands before the chunks and what stands after them."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.tokenizer import Tokenizer

CHUNKS = "Chunks5d1fe0b7Stand3c9aHere"  # survives templates that trim, and no document contains it
QUESTION = "Question8a44c1d2Stands0e6fHere"
CONTENT = "Documents:\n\n{chunks}\n\nQuestion: {question}"


@dataclass(frozen=True)
class PromptTemplate:
    """`prefix_ids` stand before the chunks; `suffix_ids(question)` after them. Special tokens come from the template alone."""

    tokenizer: Tokenizer
    prefix_ids: tuple[int, ...]
    before_question: str
    after_question: str

    def suffix_ids(self, question: str) -> tuple[int, ...]:
        """Ids of the question and all after it. Control tokens written in the question stay plain text.

        Raises UsageError when the question is empty.
        """
        question = question.strip()
        if not question:
            raise UsageError("the question is empty", 'write it as an argument: cacheblend ask "Who leads billing?"')
        encode = self.tokenizer.encode_template_rest
        if self.tokenizer.control_ids.isdisjoint(encode(question)):
            return tuple(encode(self.before_question + question + self.after_question))
        plain = self.tokenizer.encode_text(question)
        return (*encode(self.before_question), *plain, *encode(self.after_question))


def split_template(tokenizer: Tokenizer) -> PromptTemplate:
    """Render the chat template around sentinels and split it there.

    Raises UsageError when the template drops or repeats the user's message.
    """
    message = {"role": "user", "content": CONTENT.format(chunks=CHUNKS, question=QUESTION)}
    rendered = tokenizer.render([message])
    if rendered.count(CHUNKS) != 1 or rendered.count(QUESTION) != 1:
        raise UsageError(
            "the chat template does not render the user's message exactly once",
            "check chat_template in the model directory",
        )
    prefix, rest = rendered.split(CHUNKS)
    before, after = rest.split(QUESTION)
    return PromptTemplate(tokenizer, tuple(tokenizer.encode_template(prefix)), before, after)
