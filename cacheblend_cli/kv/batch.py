"""Batches of stored KV on the way to a device: chunks of a layer that are copied together, and their layout in a
buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from cacheblend_store.format.blobs import PLAIN, blob_spec
from cacheblend_store.format.codecs import DTYPES
from torch import Tensor

from cacheblend_cli.kv.stored_prompt import StoredSpan

ALIGNMENT = 512


class KVBatch:
    """Chunks of one layer that are copied and placed together. The batches group the same chunks at every layer.

    The buffer holds the codec's tensors one after another, each for all chunks in order: k of every chunk, then v. So
    chunks stored without scales become one tensor; a chunk with scales is a batch of its own.
    """

    def __init__(self, first: int, spans: Sequence[StoredSpan], *heads: int) -> None:
        """heads: KV heads, head_dim and V's head_dim, as in `blob_spec`."""
        self.first, self.spans = first, tuple(spans)
        specs = [blob_spec(s.codec, s.num_tokens, *heads) for s in spans]
        self._parts: dict[str, tuple[torch.dtype, list[int], list[int]]] = {}  # dtype, shape, start of each chunk
        self.num_bytes = 0
        for name, spec in specs[0].items():
            bounds = list(accumulate((s[name].num_bytes for s in specs), initial=self.num_bytes))
            shape = [sum(s[name].shape[0] for s in specs), *spec.shape[1:]]
            self._parts[name] = DTYPES[spec.dtype], shape, bounds
            self.num_bytes = bounds[-1] + -bounds[-1] % ALIGNMENT

    def targets(self, index: int, buffer: memoryview) -> dict[str, memoryview]:
        """Buffer slices for the tensors of chunk `first + index`."""
        return {name: buffer[at[index] : at[index + 1]] for name, (_, _, at) in self._parts.items()}

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Tensors of all chunks as views of the buffer [num_bytes] uint8."""
        return {
            name: buffer[at[0] : at[-1]].view(dtype).view(shape) for name, (dtype, shape, at) in self._parts.items()
        }


def batches_of(
    spans: Sequence[StoredSpan], shapes: Sequence[tuple[int, ...]], most_bytes: int
) -> list[dict[tuple[int, ...], KVBatch]]:
    """Group adjacent chunks with the same plain codec, up to most_bytes; every other chunk is a batch of its own.

    Returns, per group, a batch for each of the layers' shapes (KV heads, head_dim). The largest shape decides the size
    of a group.
    """
    largest = max(shapes, key=lambda heads: heads[0] * (heads[1] + heads[-1]))
    groups: list[list[StoredSpan]] = []
    room = 0
    for span in spans:
        spec = blob_spec(span.codec, span.num_tokens, *largest)
        size = sum(tensor.num_bytes for tensor in spec.values())
        if groups and span.codec in PLAIN and span.codec == groups[-1][0].codec and size <= room:
            groups[-1].append(span)
        else:
            groups.append([span])
            room = most_bytes
        room -= size
    firsts = accumulate(map(len, groups), initial=0)
    return [
        {heads: KVBatch(first, group, *heads) for heads in set(shapes)}
        for first, group in zip(firsts, groups, strict=False)
    ]
