"""The errors a user can cause, each with the exit code of the CLI contract."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    INTERNAL = 1
    USAGE = 2
    NOT_FOUND = 3
    STORE = 4
    DEVICE = 5
    CHANGED = 6  # no error: the answer was printed, and --confirm changed it
    INTERRUPTED = 130


class CacheBlendError(Exception):
    """Base class of errors with a message and a hint.

    `message` says what and why; `hint` names the next step and is printed on its own line.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CacheBlendError):
    """A bad flag, a bad value, an unknown setting, an input the tool cannot take."""

    exit_code = ExitCode.USAGE


class PromptTooLong(UsageError):
    """A prompt and its answer do not fit the model's context."""


class TextRefused(UsageError):
    """A text that a model's tokenizer cannot keep apart from its control tokens, or has no embeddings for."""


class TemplateFailed(UsageError):
    """The chat template raised. reason: in its words. hint: None to check the template."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(f"the chat template failed: {reason}", hint or "check chat_template in the model directory")
        self.reason = reason


class NotFoundError(CacheBlendError):
    """A file, model or chunk id that is not there, or an id prefix that is ambiguous."""

    exit_code = ExitCode.NOT_FOUND


class NothingFound(NotFoundError):
    """A search that finds no chunk."""


class StoreFault(CacheBlendError):
    """The store is corrupt, full, locked, of a wrong format, or out of disk space."""

    exit_code = ExitCode.STORE


class DeviceError(CacheBlendError):
    """No CUDA, out of memory, or a backend that cannot run on this machine."""

    exit_code = ExitCode.DEVICE


class QueueFull(CacheBlendError):
    """Too many requests wait. retry_after_s: seconds until there may be room."""

    exit_code = ExitCode.DEVICE

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(
            f"{waiting} questions wait already", f"ask again in about {max(1, round(retry_after_s))} seconds"
        )
        self.retry_after_s = retry_after_s
