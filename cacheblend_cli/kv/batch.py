"""Stored KV on its way to a device: which chunks of a layer travel together, and where in the buffer they lie."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_store.format.blobs import TensorSpec
from cacheblend_store.format.codecs import DTYPES
from cacheblend_store.format.layouts import PLAIN, blob_spec
from torch import Tensor

from cacheblend_cli.kv.stored_prompt import StoredSpan

BATCH_BYTES = 16 << 20  # some chunks: one copy and one launch for all of them, and yet several batches on their way
ALIGNMENT = 512


class KVBatch:
    """Chunks of one layer that are copied and placed together: the same for every layer.

    In the buffer lie the tensors of the codec one after another, each of all chunks in order: k of every chunk, then v.
    So chunks stored as they are (no scales) become one tensor; a chunk with scales is a batch of its own.
    """

    def __init__(self, first: int, spans: Sequence[StoredSpan], num_kv_heads: int, head_dim: int) -> None:
        self.first, self.spans = first, tuple(spans)
        self.codec = spans[0].codec
        self._specs = [blob_spec(self.codec, s.num_tokens, num_kv_heads, head_dim) for s in spans]
        self._offsets: list[dict[str, int]] = [{} for _ in spans]
        self._whole: dict[str, tuple[int, TensorSpec]] = {}
        offset = 0
        for name in self._specs[0]:
            self._whole[name] = (offset, _joined([s[name] for s in self._specs]))
            for own, offsets in zip(self._specs, self._offsets, strict=True):
                offsets[name] = offset
                offset += own[name].num_bytes
            offset += -offset % ALIGNMENT
        self.num_bytes = offset

    def targets(self, index: int, buffer: memoryview) -> dict[str, memoryview]:
        """Where in the buffer the tensors of chunk `first + index` belong."""
        own, offsets = self._specs[index], self._offsets[index]
        return {name: buffer[offsets[name] : offsets[name] + spec.num_bytes] for name, spec in own.items()}

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors of all chunks as views of the buffer [num_bytes] uint8."""
        found = {}
        for name, (offset, spec) in self._whole.items():
            found[name] = buffer[offset : offset + spec.num_bytes].view(DTYPES[spec.dtype]).view(spec.shape)
        return found


def batches_of(spans: Sequence[StoredSpan], num_kv_heads: int, head_dim: int) -> list[KVBatch]:
    """Adjacent chunks of one plain codec together, up to BATCH_BYTES; every other chunk alone."""
    batches: list[KVBatch] = []
    held: list[StoredSpan] = []
    size = 0
    for index, own in enumerate(spans):
        spec = blob_spec(own.codec, own.num_tokens, num_kv_heads, head_dim)
        more = sum(t.num_bytes for t in spec.values())
        joins = held and own.codec in PLAIN and own.codec == held[-1].codec and size + more <= BATCH_BYTES
        if held and not joins:
            batches.append(KVBatch(index - len(held), held, num_kv_heads, head_dim))
            held, size = [], 0
        held.append(own)
        size += more
    if held:
        batches.append(KVBatch(len(spans) - len(held), held, num_kv_heads, head_dim))
    return batches


def _joined(specs: Sequence[TensorSpec]) -> TensorSpec:
    """The tensors one after another along their first dimension."""
    return TensorSpec(specs[0].dtype, (sum(s.shape[0] for s in specs), *specs[0].shape[1:]))
