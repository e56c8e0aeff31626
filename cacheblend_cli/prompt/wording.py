"""Wording of a prompt: system prompt, text around chunks and question, variables of the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.model.model_files import is_there, read_text

OWN_FILE = "cacheblend_prompt.txt"
"""File in a model's directory with the prompt that the model was trained with. It is the model's default."""
DEFAULT = (
    "Answer the question at the end from these documents alone, in one or two sentences. "
    "If they do not say it, answer: not in the documents.\n\n"
    "Documents:\n\n{chunks}\n\nQuestion: {question}"
)
CHUNKS, QUESTION, SOURCE = "{chunks}", "{question}", "{source}"
_PLACE = re.compile(r"\{[a-z_]+\}")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_SHOWN = 48  # characters of a value in a message


@dataclass(frozen=True)
class Wording:
    """Texts of a prompt other than chunks and question."""

    # The user's message, with {chunks} and {question} once each, in this order. {source} may come before them: the text
    # from its line to {chunks} becomes the head of every chunk.
    prompt: str = DEFAULT
    system: str = ""  # system prompt, "" for none
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    given: bool = field(default=False, compare=False)  # the user chose this prompt
    raw: bool = False  # use only chunks and question, without the chat template

    def __post_init__(self) -> None:
        check_prompt(self.prompt)

    @classmethod
    def of(cls, model_dir: Path, prompt: str = "", system: str = "", template_var: Sequence[str] = ()) -> Wording:
        """Return the wording for these settings. The default prompt is the model's own, else DEFAULT.

        template_var: items NAME=VALUE.
        """
        own = model_dir / OWN_FILE
        text = prompt or (read_text(own).strip() if is_there(own) else DEFAULT)
        return cls(text, system.strip(), parse_variables(template_var), given=bool(prompt))

    @property
    def head(self) -> str:
        """Text before each chunk, with the placeholder {source}; "" for none."""
        before = self.prompt.split(CHUNKS)[0]
        return before[before.rfind("\n", 0, before.index(SOURCE)) + 1 :] if SOURCE in before else ""

    @property
    def beginning(self) -> tuple[Any, ...]:
        """The parts that determine the text before the chunks."""
        return self.prompt.split(CHUNKS)[0], self.system, self.variables, self.raw

    def message(self, chunks: str, question: str) -> str:
        """Return the user's message with chunks and question filled in."""
        before, rest = self.prompt.split(CHUNKS)
        between, after = rest.split(QUESTION)
        return before.removesuffix(self.head) + chunks + between + question + after

    def source(self, model_dir: Path) -> str:
        """Describe where the prompt comes from."""
        return (
            "--prompt" if self.given else f"the model's {OWN_FILE}" if (model_dir / OWN_FILE).is_file() else "default"
        )

    def to_dict(self) -> dict[str, Any]:
        record: dict[str, Any] = to_builtins(self)
        return record

    def differences(self, other: Wording) -> list[tuple[str, str]]:
        """Return (flag of this wording, flag of the other) for each difference."""
        found = []
        if self.prompt != other.prompt:
            found.append((self._prompt_flag(other), other._prompt_flag(self)))
        if self.system != other.system:
            found.append((_flag("system", self.system), _flag("system", other.system)))
        for name in sorted(self.variables.keys() | other.variables.keys()):
            mine, others = (_variable_flag(name, of.variables) for of in (self, other))
            if mine != others:
                found.append((mine, others))
        return found

    def _prompt_flag(self, other: Wording) -> str:
        return _flag("prompt", self.prompt) if self.given or not other.given else "no --prompt"


def check_prompt(prompt: str) -> None:
    """Raise UsageError for a prompt without both placeholders in order, or with unknown placeholders."""
    unknown = sorted(set(_PLACE.findall(prompt)) - {CHUNKS, QUESTION, SOURCE})
    if unknown:
        raise UsageError(
            f"the prompt has the unknown placeholder {unknown[0]}", f"known: {CHUNKS}, {QUESTION}, {SOURCE}"
        )
    for place in (CHUNKS, QUESTION):
        if prompt.count(place) != 1:
            count = "no" if place not in prompt else f"{prompt.count(place)} times the"
            raise UsageError(f"the prompt has {count} placeholder {place}", "it needs it once")
    if prompt.count(SOURCE) > 1 or prompt.find(SOURCE) > prompt.index(CHUNKS):
        raise UsageError(
            f"the prompt has {SOURCE} twice, or after {CHUNKS}",
            f"use it once, right before {CHUNKS}: the text from its line to there is repeated before every chunk",
        )
    if prompt.index(QUESTION) < prompt.index(CHUNKS):
        raise UsageError(
            f"the prompt has {QUESTION} before {CHUNKS}",
            "the text before the chunks is computed once for all questions: move the question after them",
        )


def read_prompt(path: str) -> str:
    """Read a prompt file and strip it. Raises NotFoundError or UsageError."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise NotFoundError(f"no prompt file {path}", f"--prompt takes a file of text with {CHUNKS} and {QUESTION}")
    text = read_text(file).strip()
    try:
        check_prompt(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from error
    return text


def parse_variables(items: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE items. A value that parses as JSON (true, 3, "3") is JSON, else text. Raises UsageError."""
    found: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not _VARIABLE.fullmatch(name.strip()):
            raise UsageError(f"--template-var {item} is not NAME=VALUE", "for example enable_thinking=true")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value
    return found


def _flag(name: str, value: str) -> str:
    shown = value if len(value) <= _SHOWN else value[: _SHOWN - 3] + "..."
    return f"--{name} {shown!r}" if value else f"no --{name}"


def _variable_flag(name: str, variables: Mapping[str, Any]) -> str:
    return f"--template-var {name}={json.dumps(variables[name])}" if name in variables else f"no --template-var {name}"
