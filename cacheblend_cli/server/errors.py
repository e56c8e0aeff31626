"""Errors as OpenAI's API tells them."""

from __future__ import annotations

import math
from typing import Any

from cacheblend_cli.errors import ExitCode, PromptTooLong, QueueFull

_STATUS = {ExitCode.USAGE: 400, ExitCode.NOT_FOUND: 404, ExitCode.STORE: 503, ExitCode.DEVICE: 503}
_SAID = {
    ExitCode.STORE: "the store cannot be used now; the server's log says why",
    ExitCode.INTERNAL: "the server failed; its log says how",
}
"""Messages of errors that may name paths of the server's machine."""


class ApiError(Exception):
    """status: of HTTP. param: the field that is wrong. code: for programs."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: float = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))} if retry_after_s else {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping", code="stopping", retry_after_s=1)


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """What is told of an error of ours. Nothing of it names a path of this machine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, error.message, code="queue_full", retry_after_s=max(1.0, error.retry_after_s))
    code = getattr(error, "exit_code", ExitCode.INTERNAL)
    status, message = _STATUS.get(code, 500), _SAID.get(code)
    if message is None:
        hint = getattr(error, "hint", None)
        message = f"{getattr(error, 'message', error)}" + (f" ({hint})" if hint else "")
    return ApiError(status, message, code="context_length_exceeded" if isinstance(error, PromptTooLong) else None)
