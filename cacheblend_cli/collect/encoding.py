"""Encode collected KV on its device. On a GPU, bytes of a chunk are copied to the host while later chunks are
computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate, groupby, islice

import torch
from cacheblend_store.format.blobs import blob_prefix, blob_spec, encode_blob, state_spec
from cacheblend_store.format.codecs import check_finite, coded_unchecked, encode_kv
from torch import Tensor

from cacheblend_cli.collect.prefill import ChunkKV, pack_tokens
from cacheblend_cli.kv.pool import to_host
from cacheblend_cli.model.states import SequenceState, StateLayout

_VALUES = 1 << 23  # of K and V, encoded in one pass: 8 layers of 512 tokens of an 8B, with 150 MB of temporary tensors
_COPIES = 2  # chunks in pinned memory: one is read while the next is copied


def encoded(chunks: Iterable[ChunkKV], codec: str) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield the key and the blobs, one per layer, of every chunk in order. Raises CodecError for the chunk that the
    codec cannot hold.

    On a GPU, chunks are taken up to a launch's tokens ahead, so that the GPU computes the next launch while the caller
    handles the blobs of the previous one.
    """
    waiting, num_tokens = deque[EncodedChunk](), 0
    for kv in chunks:
        waiting.append(encode_chunk(kv, codec))
        num_tokens += waiting[-1].num_tokens
        ahead = pack_tokens(kv.k[0].device) if kv.k[0].is_cuda else 0
        del kv  # a chunk's raw KV need not outlive its encoding
        while waiting and num_tokens > ahead:
            num_tokens -= waiting[0].num_tokens
            yield _first(waiting)
    while waiting:
        yield _first(waiting)


def _first(waiting: deque[EncodedChunk]) -> tuple[bytes, list[bytes]]:
    for chunk in islice(waiting, _COPIES):
        chunk.start_copy()
    chunk = waiting.popleft()
    return chunk.key, chunk.blobs()


def encode_chunk(kv: ChunkKV, codec: str) -> EncodedChunk:
    """Encode a chunk on its device, or on the host if a GPU has no memory for it."""
    if kv.k[0].is_cuda:
        try:
            return _DeviceChunk(kv, codec)
        except torch.OutOfMemoryError:
            pass  # leave the handler first: the exception's frames hold memory
    return EncodedChunk(kv, codec)


class EncodedChunk:
    """A chunk encoded on the host."""

    def __init__(self, kv: ChunkKV, codec: str) -> None:
        self.key, self.num_tokens = kv.key, kv.k[0].shape[0]
        self._state = [] if kv.state is None else [encode_state(kv.state)]
        self._encode(kv, codec)

    def _encode(self, kv: ChunkKV, codec: str) -> None:
        self._blobs = [encode_kv(k, v, codec) for k, v in zip(kv.k, kv.v, strict=True)]

    def start_copy(self) -> None:
        """Queue the copy to the host, after the encoding."""

    def blobs(self) -> list[bytes]:
        """Return one blob per layer, and that of the state. Waits for the copy; call it once. Raises CodecError."""
        return self._blobs + self._state


class _DeviceChunk(EncodedChunk):
    """A chunk encoded on a GPU, without a synchronisation: the tensors of all layers in one buffer, then two flags a
    layer, whether K and V are finite."""

    def _encode(self, kv: ChunkKV, codec: str) -> None:
        self._codec = codec
        self._host: Tensor | None = None
        self._specs = [blob_spec(codec, *k.shape, v.shape[-1]) for k, v in zip(kv.k, kv.v, strict=True)]
        sizes = (sum(tensor.num_bytes for tensor in spec.values()) for spec in self._specs)
        self._bounds = [*accumulate(sizes, initial=0)]
        self._data = torch.empty(self._bounds[-1] + 2 * len(kv.k), dtype=torch.uint8, device=kv.k[0].device)
        is_finite = self._flags(self._data)
        for layers in _groups(kv):
            tensors, own = coded_unchecked(torch.stack(kv.k[layers]), torch.stack(kv.v[layers]), codec)
            is_finite[layers].copy_(own)
            rows = self._data[self._bounds[layers.start] : self._bounds[layers.stop]].view(len(own), -1)
            at = 0
            for name, tensor in self._specs[layers.start].items():
                rows[:, at : at + tensor.num_bytes].copy_(tensors[name].view(torch.uint8).reshape(len(own), -1))
                at += tensor.num_bytes
        self._encoded, self._copied = torch.cuda.Event(), torch.cuda.Event(blocking=True)
        self._encoded.record()

    def start_copy(self) -> None:
        if self._host is not None:
            return
        stream = _copy_stream(self._data.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._encoded)
            self._host = to_host(self._data)
            self._copied.record(stream)
        self._data.record_stream(stream)

    def blobs(self) -> list[bytes]:
        self.start_copy()
        assert self._host is not None
        self._copied.synchronize()
        check_finite(self._flags(self._host), self._codec)
        data, ends = self._host.numpy().data, self._bounds[1:]
        blobs = [
            b"".join((blob_prefix(spec), data[start:end]))
            for spec, start, end in zip(self._specs, self._bounds, ends, strict=False)
        ]
        del self._data
        self._host = None  # its pinned memory is reused for a later chunk
        return blobs + self._state

    def _flags(self, data: Tensor) -> Tensor:
        """View the flags in the buffer, [num_layers, 2]."""
        return data[self._bounds[-1] :].view(-1, 2)


def encode_state(state: SequenceState) -> bytes:
    """Return the blob of recurrent layers' state, as `records.layer_spec` describes it."""
    layout = StateLayout.of(state)
    spec = state_spec(layout.stored)
    return encode_blob(spec, dict(zip(spec, layout.to_bytes(state), strict=True)))


def _groups(kv: ChunkKV) -> Iterator[slice]:
    """Yield runs of layers to encode in one pass: of equal shapes, of at most _VALUES."""
    start = 0
    for shapes, layers in groupby((k.shape, v.shape) for k, v in zip(kv.k, kv.v, strict=True)):
        end, most = start + len(list(layers)), max(1, _VALUES // sum(shape.numel() for shape in shapes))
        for first in range(start, end, most):
            yield slice(first, min(first + most, end))
        start = end


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of copies to the host, created once: PyTorch hands out the same 32 streams in turn."""
    return torch.cuda.Stream(device)
