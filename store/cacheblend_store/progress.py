"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (done, total): chunks, or steps where there are none to count."""
