"""A reader of GGUF files that tells a truncated file from other damage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader


class CheckedReader(GGUFReader):
    """The package's reader. Raises EOFError, with the sizes, for a file that ends before its header or its last tensor does."""

    def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
        if offset + count * np.dtype(dtype).itemsize > len(self.data):
            raise EOFError(f"it ends after {len(self.data):,} bytes, inside its header")
        return super()._get(offset, dtype, count, *args, **kwargs)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        size, promised = len(self.data), 0
        for field in fields:
            *_, dims, kind, offset = field.parts
            values, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
            promised = max(promised, start_offs + int(offset[0]) + math.prod(dims.tolist()) * num_bytes // values)
        if promised > size:
            raise EOFError(
                f"it has {size:,} of the {promised:,} bytes that its header promises, {promised - size:,} are missing"
            )
        super()._build_tensors(start_offs, fields)
