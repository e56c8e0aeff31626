"""Conversion of plain values to dataclasses and other types, by msgspec, from any thread."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

_preparing = threading.Lock()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
T = TypeVar("T")


def convert(value: Any, of: type[T]) -> T:
    """Return the value as `of`. Raises msgspec.ValidationError, a ValueError."""
    decoder(of)
    return msgspec.convert(value, of)


def decoder(of: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return the type's decoder of MessagePack.

    With the first decoder of a class, msgspec 0.22 publishes what it knows of the class before that is complete: a
    thread that uses it then crashes the process.
    """
    if of not in _decoders:
        with _preparing:
            _decoders[of] = msgspec.msgpack.Decoder(of)
    return _decoders[of]
