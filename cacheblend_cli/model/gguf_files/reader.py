"""A reader of GGUF files that distinguishes a truncated file from other damage, and bounds what it reads."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

from cacheblend_cli.model.gguf_files.tensors import bytes_of
from cacheblend_cli.model.mapped_file import overlap

LONG = 4096  # elements; longer arrays (the vocabulary) are skipped: the package takes seconds for 100,000 strings
# Limits: the package makes several objects of each key, tensor and string. Gemma 3 has 40, 444 and 1.3 million.
MOST_KEYS, MOST_TENSORS, MOST_ITEMS = 1 << 10, 1 << 16, 1 << 22


class CheckedReader(GGUFReader):
    """The package's reader. Raises EOFError, with the sizes, for a file that ends before its last tensor, and
    ValueError for other damage."""

    def __init__(self, path: Path | str) -> None:
        if not Path(path).is_file():  # mapping a FIFO waits for its writer
            raise ValueError("it is not a regular file")
        self._num_items = 0
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise EOFError(f"it ends after {len(self.data):,} bytes, inside its header")
        return super()._get(offset, dtype, count, *args, **kwargs)

    def _build_fields(self, offs: int, count: int) -> Any:
        if count > MOST_KEYS:
            raise ValueError(f"it has {count:,} keys; the limit is {MOST_KEYS:,}")
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: int) -> Any:
        if count > MOST_TENSORS:
            raise ValueError(f"it has {count:,} tensors; the limit is {MOST_TENSORS:,}")
        return super()._build_tensor_info(offs, count)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """Return a field's bytes, parts, indices of its values among the parts, and types. A long array is one part
        that is not split into values."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = int(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
        self._num_items += count
        if kind == GGUFValueType.ARRAY:
            raise ValueError("it has an array of arrays")
        if self._num_items > MOST_ITEMS:
            raise ValueError(f"its arrays have {self._num_items:,} values; the limit is {MOST_ITEMS:,}")
        if count < LONG:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type, start = GGUFValueType(kind), orig_offs + 12
        if item_type == GGUFValueType.STRING:
            end = self._end_of_strings(start, count)
        else:
            end = start + count * np.dtype(self.gguf_scalar_to_np[item_type]).itemsize
        values = self._get(start, np.uint8, end - start)
        heads = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        return end - orig_offs, [*heads, values], [2] * count, [GGUFValueType.ARRAY, item_type]

    def _end_of_strings(self, at: int, count: int) -> int:
        data, length_of = self.data.data, struct.Struct("=Q" if self.byte_order == "I" else ">Q").unpack_from
        try:
            for _ in range(count):
                at += 8 + length_of(data, at)[0]
        except struct.error:
            raise EOFError(f"it ends after {len(self.data):,} bytes, inside its header") from None
        return at

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        start_offs = int(start_offs)
        size, ranges = len(self.data), list[tuple[int, int, str]]()
        for field in fields:
            _, raw_name, _, dims, kind, offset = field.parts
            name, begin = raw_name.tobytes().decode(), int(offset[0])
            if begin % int(self.alignment):
                raise ValueError(f"{name} begins at byte {begin:,}, not at a multiple of {self.alignment}")
            try:
                num_bytes = bytes_of(GGMLQuantizationType(int(kind[0])).name, tuple(reversed(dims.tolist())))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            ranges.append((start_offs + begin, start_offs + begin + num_bytes, name))
        promised = max((end for _, end, _ in ranges), default=0)
        if promised > size:
            raise EOFError(
                f"it has {size:,} of the {promised:,} bytes that its header promises, {promised - size:,} are missing"
            )
        if shared := overlap(ranges):
            raise ValueError(f"{shared[0]} and {shared[1]} overlap")
        super()._build_tensors(start_offs, fields)
