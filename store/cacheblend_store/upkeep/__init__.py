"""Maintenance: verify, prune, compact, salvage, statistics, moving chunks to and from a tier."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (done, total), in chunks or steps."""
