"""JSON for untrusted records: size-limited before parsing, type-checked afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from msgspec import DecodeError, Meta, to_builtins
from msgspec.json import decode, encode

from cacheblend_store.conversion import convert

Count = Annotated[int, Meta(ge=0, le=1 << 53)]  # exact in JSON
Size = Annotated[int, Meta(gt=0, le=1 << 20)]  # a dimension of a tensor
Moment = Annotated[float, Meta(ge=-1e300, le=1e300)]  # seconds since the epoch; neither infinite nor NaN
TokenIds = tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...]
_MAX_CONTAINERS = 1 << 20  # lists and objects: in memory each takes twenty times its two bytes of JSON
T = TypeVar("T")


def load_object(data: bytes, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises ValueError for anything else."""
    if len(data) > max_bytes or data.count(b"[") + data.count(b"{") > _MAX_CONTAINERS:
        raise ValueError("the record is too long")
    try:
        try:
            found = decode(data)
        except (DecodeError, UnicodeDecodeError):
            found = json.loads(data)  # msgspec rejects lone surrogates, which texts may contain
    except RecursionError as error:
        raise ValueError("the record is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("the record is not an object")
    return found


def dump_object(record: Mapping[str, Any]) -> bytes:
    """Return the object as JSON, with bytes encoded as base64."""
    try:
        return encode(record)
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(to_builtins(record), ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "surrogatepass"
        )


def typed(record: Mapping[str, Any], of: type[T]) -> T:
    """Convert the record to a dataclass. Raises ValueError for unknown fields and for values of wrong type or range."""
    if not record.keys() <= of.__annotations__.keys():
        raise ValueError("it has an unknown field")
    return convert(record, of)
