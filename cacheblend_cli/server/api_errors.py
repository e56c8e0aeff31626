"""Errors in the form of OpenAI's API."""

from __future__ import annotations

import math
import re
from typing import Any

from starlette.responses import JSONResponse

from cacheblend_cli.errors import ExitCode, PromptTooLong, QueueFull, UnsupportedClaims
from cacheblend_cli.settings import GROUPS, grouped

_STATUS = {ExitCode.USAGE: 400, ExitCode.NOT_FOUND: 404, ExitCode.STORE: 503, ExitCode.DEVICE: 503}
_CODES = {PromptTooLong: "context_length_exceeded", UnsupportedClaims: "unsupported_claims"}
_MESSAGES = {
    ExitCode.STORE: "the store cannot be used; see the server's log",
    ExitCode.INTERNAL: "internal server error; see the server's log",
}
"""Messages in place of those that may contain paths of the server."""
_FIELDS = {
    **{name: f"blend.{name}" for name in grouped("blend", "research")},
    **{name: name for name in GROUPS["sampling"]},
    "top_k": "search.k", "chunks": "chunks", "logprobs": "logprobs", "json_schema": "response_format",
    "regex": "regex", "system": "messages", "verify": "verify", "explain": "explain",
}  # fmt: skip
"""Setting of the command line -> request field with the same meaning."""
_ONLY_FIELDS = ("top_k", "min_p")  # of sampling, without a setting
OLLAMA = "/api/"
"""Path prefix of Ollama's API."""
_FLAG = re.compile(r"--([a-z][a-z-]*)")


class ApiError(Exception):
    """An error response. status: HTTP status. param: the wrong field. code: machine-readable name."""

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

    @property
    def ollama_body(self) -> dict[str, Any]:
        """Return the body in Ollama's form, with two extra fields."""
        return {"error": self.message, "param": self.param, "code": self.code}

    def response(self, path: str) -> JSONResponse:
        """Return the response in the form of the API that the path belongs to."""
        return JSONResponse(self.ollama_body if path.startswith(OLLAMA) else self.body, self.status, self.headers)


def server_stopping() -> ApiError:
    return ApiError(503, "the server is stopping", code="stopping", retry_after_s=1)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """Return the error with request fields in place of flags, and without paths of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, error.message, code="queue_full", retry_after_s=max(1.0, error.retry_after_s))
    code = getattr(error, "exit_code", ExitCode.INTERNAL)
    status, message, param = _STATUS.get(code, 500), _MESSAGES.get(code), None
    if message is None:
        message, param = in_fields(str(getattr(error, "message", error)))
        hint, _ = in_fields(getattr(error, "hint", None) or "")
        if hint and "--" not in hint and "cacheblend " not in hint:  # a client cannot run commands
            message += f" ({hint})"
    kind = next((name for known, name in _CODES.items() if isinstance(error, known)), None)
    return ApiError(status, message, code=kind, param=param)


def in_fields(text: str) -> tuple[str, str | None]:
    """Return the message with request fields in place of flags, and the first field it names."""
    named = [_FIELDS[flag] for flag in map(_as_setting, _FLAG.findall(text)) if flag in _FIELDS]
    first = text.split(" ", 1)[0].strip("'\":,")
    param = named[0] if named else first if first in (*_FIELDS.values(), *_ONLY_FIELDS) else None
    return _FLAG.sub(lambda match: _FIELDS.get(_as_setting(match[1]), match[0]), text), param


def _as_setting(flag: str) -> str:
    return flag.replace("-", "_")
