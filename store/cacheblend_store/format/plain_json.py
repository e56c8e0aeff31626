"""JSON of records that anybody may have written: bounded before it is parsed, and of the types that are expected after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar

from msgspec import Meta, convert

Count = Annotated[int, Meta(ge=0, le=1 << 53)]  # what JSON carries exactly
Size = Annotated[int, Meta(gt=0, le=1 << 20)]  # a dimension of a tensor
Moment = Annotated[float, Meta(ge=-1e300, le=1e300)]  # seconds since the epoch; neither infinite nor not a number
TokenIds = tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...]
_MAX_CONTAINERS = 1 << 20  # lists and objects: each takes twenty times its two bytes
T = TypeVar("T")


def load_object(text: str, max_bytes: int) -> dict[str, Any]:
    """The JSON object in `text`. Raises ValueError, whatever else the text is."""
    if len(text) > max_bytes or text.count("[") + text.count("{") > _MAX_CONTAINERS:
        raise ValueError("the record is longer than any record")
    try:
        data = json.loads(text)  # msgspec's parser takes no lone surrogate, which texts may hold
    except RecursionError as error:
        raise ValueError("the record is deeper than any record") from error
    if not isinstance(data, dict):
        raise ValueError("the record is no object")
    return data


def typed(record: Mapping[str, Any], of: type[T]) -> T:
    """The record as a dataclass, each field of its type and range. Raises ValueError when it is not, and for other fields."""
    known = {f.name for f in fields(of)}  # type: ignore[arg-type]
    if not record.keys() <= known:
        raise ValueError("it has an unknown field")
    return convert(record, of)
