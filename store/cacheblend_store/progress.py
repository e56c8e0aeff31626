"""Progress of long operations."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (done, total), in chunks or steps."""
