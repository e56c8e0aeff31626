"""Errors in the form of OpenAI's API."""

from __future__ import annotations

import math
import re
from typing import Any

from starlette.responses import JSONResponse

from cacheblend_cli.errors import ExitCode, PromptTooLong, QueueFull
from cacheblend_cli.settings import GROUPS

_STATUS = {ExitCode.USAGE: 400, ExitCode.NOT_FOUND: 404, ExitCode.STORE: 503, ExitCode.DEVICE: 503}
_SAID = {
    ExitCode.STORE: "the store cannot be used now; the server's log says why",
    ExitCode.INTERNAL: "the server failed; its log says how",
}
"""Messages of errors that may name paths of the server's machine."""
_FIELDS = {
    **{name: f"blend.{name}" for name in GROUPS["blend"]},
    **{name: name for name in GROUPS["sampling"]},
    "sample_top_k": "top_k", "top_k": "search.k", "chunks": "chunks", "logprobs": "logprobs", "json_schema": "response_format",
    "regex": "regex", "system": "messages", "verify": "verify", "explain": "explain",
}  # fmt: skip
"""Fields of a request, by the flags of the command line that say the same."""
OLLAMA = "/api/"
"""Beginning of the paths of Ollama's API."""
_FLAG = re.compile(r"--([a-z][a-z-]*)")


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

    @property
    def ollama_body(self) -> dict[str, Any]:
        """The body in the form of Ollama's API, with two fields of ours."""
        return {"error": self.message, "param": self.param, "code": self.code}

    def response(self, path: str) -> JSONResponse:
        """The reply to a request for that path, in the form of its API."""
        return JSONResponse(self.ollama_body if path.startswith(OLLAMA) else self.body, self.status, self.headers)


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping", code="stopping", retry_after_s=1)


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """The error as the API reports it: with fields in the place of flags, and without paths of this machine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, error.message, code="queue_full", retry_after_s=max(1.0, error.retry_after_s))
    code = getattr(error, "exit_code", ExitCode.INTERNAL)
    status, message, param = _STATUS.get(code, 500), _SAID.get(code), None
    if message is None:
        message, param = in_fields(str(getattr(error, "message", error)))
        hint, _ = in_fields(getattr(error, "hint", None) or "")
        if hint and "--" not in hint and "cacheblend " not in hint:  # what a client can follow
            message += f" ({hint})"
    kind = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return ApiError(status, message, code=kind, param=param)


def in_fields(text: str) -> tuple[str, str | None]:
    """A message with the request's fields in the place of flags, and the field that it is about: the first one that it
    names."""
    named = [_FIELDS[flag] for flag in map(_as_setting, _FLAG.findall(text)) if flag in _FIELDS]
    first = text.split(" ", 1)[0].strip("'\":,")
    param = named[0] if named else first if first in _FIELDS.values() else None
    return _FLAG.sub(lambda found: _FIELDS.get(_as_setting(found[1]), found[0]), text), param


def _as_setting(flag: str) -> str:
    return flag.replace("-", "_")
