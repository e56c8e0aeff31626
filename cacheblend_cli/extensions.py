"""Extensions that other distributions install, found by their entry points (docs/extending.md).

Names of this distribution come first. Entry points are looked up only for other names, and only the named extension is
imported.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from cacheblend_cli.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal["selector", "collector", "decoder", "source"]


@cache
def installed(kind: Kind) -> tuple[EntryPoint, ...]:
    """Return the entry points of the group cacheblend.selectors, .collectors, .decoders or .sources."""
    from importlib.metadata import entry_points  # slow: a tenth of the import time of a warm answer

    return tuple(sorted(entry_points(group=f"cacheblend.{kind}s")))


def find(kind: Kind, name: str) -> EntryPoint:
    """Return an extension, not yet imported. Raises UsageError if there is none of this name, or several."""
    named = [point for point in installed(kind) if point.name == name]
    if len(named) > 1:
        several = ", ".join(map(_distribution, named))
        raise UsageError(f"several distributions install a {kind} {name}: {several}", "uninstall all but one")
    if not named:
        known = ", ".join(point.name for point in installed(kind)) or "none"
        raise UsageError(f"no {kind} {name!r} is installed", f"installed: {known}; see docs/extending.md")
    return named[0]


def load(kind: Kind, name: str) -> Any:
    """Import an extension. Raises UsageError if it is not installed, or its import fails."""
    point = find(kind, name)
    try:
        return point.load()
    except Exception as error:
        raise UsageError(
            f"the {kind} {name} of {_distribution(point)} cannot be imported: {type(error).__name__}: {error}",
            "reinstall that distribution with what it needs, or uninstall it",
        ) from error


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
