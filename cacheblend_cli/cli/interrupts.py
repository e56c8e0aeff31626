"""Ctrl-C, where there is something to say of what was done until then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cacheblend_cli.errors import CacheBlendError, ExitCode


class Interrupted(CacheBlendError):
    """Ctrl-C. The hint says what is there now, and how to go on."""

    exit_code = ExitCode.INTERRUPTED


@contextmanager
def on_interrupt(hint: str) -> Iterator[None]:
    """What a Ctrl-C within is answered with; elsewhere it says "interrupted" alone."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted", hint) from error
