"""Chat templates, rendered in another process with limits: a template is a program that comes with a model.

Only sentinels pass through a template, never users' texts, so a render depends on the template, the messages, the
variables and the date. Jinja is imported only in the other process, which all templates share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cacheblend_documents.limited_process import MIB, LimitedProcess, ProcessEnded, limits, serve

from cacheblend_cli.errors import TemplateFailed, UsageError

if TYPE_CHECKING:
    from cacheblend_cli.model.chat_template import ChatTemplate

_REASON = 2000
"""Characters of an error message, which may be the template's own."""


@dataclass(frozen=True)
class TemplateLimits:
    """Limits for rendering a template once."""

    seconds: float = 2.0  # CPU time, including that of compiling it
    memory: int = 512 * MIB  # address space, bytes
    source: int = MIB  # characters of the template
    added: int = 4 * MIB  # characters of the result beyond those of the request


@dataclass(frozen=True)
class Rendered:
    """A rendered template. has_date: the template asked for the date."""

    text: str
    has_date: bool = False


_PROCESS = LimitedProcess(__name__)


def render(
    source: str,
    given: Mapping[str, Any],
    variables: Mapping[str, Any],
    now: datetime,
    limits: TemplateLimits | None = None,
) -> Rendered:
    """Render a template.

    given: variables passed to every template. variables: set by the user for this one. now: the date it may print.
    Raises TemplateFailed, also if a limit is exceeded, and UsageError for a variable that the template does not have.
    """
    limits = limits or TemplateLimits()
    if len(source) > limits.source:
        raise TemplateFailed(f"it has {len(source):,} characters; the limit is {limits.source:,}")
    request = {"source": source, "given": given, "variables": variables, "now": now.isoformat()}
    try:
        answer = json.loads(_PROCESS.ask(json.dumps(request | {"limits": asdict(limits)}).encode()))
    except ProcessEnded as ended:
        if ended.is_too_slow:
            raise TemplateFailed(f"it takes more than {limits.seconds:g} s of CPU time to render") from None
        raise TemplateFailed(f"rendering it crashed ({ended})") from None
    except OSError as error:
        raise TemplateFailed(
            f"the process that renders it cannot be started: {error.strerror}",
            "check the limit of processes: ulimit -u",
        ) from error
    if "refused" in answer:
        raise UsageError(answer["refused"], answer["hint"])
    if "failed" in answer:
        raise TemplateFailed(answer["failed"], answer["hint"])
    return Rendered(**answer)


def _answer(message: bytes) -> bytes:
    request = json.loads(message)
    most = TemplateLimits(**request.pop("limits"))
    try:
        with limits(most.seconds, most.memory):
            rendered = _render(**request)
        if len(rendered.text) > (longest := len(message) + most.added):
            raise TemplateFailed(f"its result has {len(rendered.text):,} characters; the limit is {longest:,}")
        answer = asdict(rendered)
    except TemplateFailed as error:
        answer = {"failed": error.reason[:_REASON], "hint": error.hint}
    except UsageError as error:
        answer = {"refused": error.message, "hint": error.hint}
    except MemoryError:
        answer = {"failed": f"it needs more than {most.memory // MIB:,} MiB of memory to render", "hint": None}
    return json.dumps(answer).encode()


def _render(source: str, given: Mapping[str, Any], variables: Mapping[str, Any], now: str) -> Rendered:
    has_date = False

    def strftime_now(form: str) -> str:
        nonlocal has_date
        has_date = True
        return datetime.fromisoformat(now).strftime(form)

    text = _compiled(source).render({**given, "strftime_now": strftime_now}, variables)
    return Rendered(text, has_date)


@lru_cache(maxsize=4)
def _compiled(source: str) -> ChatTemplate:
    from cacheblend_cli.model.chat_template import ChatTemplate

    return ChatTemplate(source)


if __name__ == "__main__":
    _compiled("")  # imports jinja
    serve(_answer)
