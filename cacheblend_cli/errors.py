"""Errors shown to users, each with its exit code, and suggestions for unknown names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    INTERNAL = 1
    USAGE = 2
    NOT_FOUND = 3
    STORE = 4
    DEVICE = 5
    CHANGED = 6  # not an error: the answer was printed, and --confirm changed it
    INTERRUPTED = 130


class CacheBlendError(Exception):
    """Base class of errors with a message and a hint.

    `message` says what happened and why. `hint` says what to do and is printed on its own line.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CacheBlendError):
    """An invalid flag, value, setting or input."""

    exit_code = ExitCode.USAGE


class PromptTooLong(UsageError):
    """A prompt and its answer do not fit the model's context."""


class TextRefused(UsageError):
    """A text that the tokenizer cannot distinguish from control tokens, or that has tokens without embeddings."""


class TemplateFailed(UsageError):
    """The chat template raised an error. reason: its message. hint: None to suggest checking the template."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(f"the chat template failed: {reason}", hint or "check chat_template in the model directory")
        self.reason = reason


class NotFoundError(CacheBlendError):
    """A file, model or chunk id does not exist, or an id prefix is ambiguous."""

    exit_code = ExitCode.NOT_FOUND


class ModelNotFound(NotFoundError):
    """A model is not on this machine and cannot be fetched. name: as given, "" for the default."""

    def __init__(self, name: str, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.name = name


class NothingFound(NotFoundError):
    """A search found no chunk."""


class UnsupportedClaims(NotFoundError):
    """An answer has claims that are not in its sources, and is refused."""


class DeviceError(CacheBlendError):
    """CUDA is missing, memory ran out, or a backend cannot run on this machine."""

    exit_code = ExitCode.DEVICE


class QueueFull(CacheBlendError):
    """Too many requests are waiting. retry_after_s: seconds to wait before a retry."""

    exit_code = ExitCode.DEVICE

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(
            f"{waiting} questions are already waiting", f"ask again in about {max(1, round(retry_after_s))} seconds"
        )
        self.retry_after_s = retry_after_s


def check_known(what: str, value: str, known: Sequence[str]) -> None:
    """Raise UsageError if the value is not among the known ones."""
    if value not in known:
        raise UsageError(f"unknown {what} {value!r}", f"known: {', '.join(known)}")


def did_you_mean(name: str, known: Iterable[str], see: str, most: int = 1) -> str:
    """Return a hint with up to `most` similar known names, best first. see: command that lists all names."""
    from difflib import get_close_matches

    similar = get_close_matches(name, list(known), n=most)
    return f"did you mean {' or '.join(similar)}? see: {see}" if similar else f"see: {see}"
