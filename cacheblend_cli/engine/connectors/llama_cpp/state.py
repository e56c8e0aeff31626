"""llama.cpp's state of one sequence as bytes, as written by `llama_state_seq_get_data`.

Little-endian. u32 magic, i32 sequence, then a part for the layers without a window and one for those with one, if there
are any. A part: u32 streams, u32 cells; a cell: i32 position, u32 sequences, i32 sequence; u32 whether V is transposed,
u32 layers, in some versions further constant bytes; K of each layer: i32 ggml type, u64 bytes of a row, rows
[num_kv_heads x head_dim] after RoPE; then V of each, in the same form. The layout has no version: it is learnt from,
and compared with, a state of a few tokens that llama.cpp itself wrote.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cacheblend_cli.engine.connectors.llama_cpp.library import ROPE_NEOX, ROPE_NORM
from cacheblend_cli.kv.export import KVReader
from cacheblend_cli.model.rope import inverse_frequencies
from cacheblend_cli.model.spec import ModelSpec, rotated_dim

MAGIC = 0xAF143CD8
GGML_TYPE_F16 = 1
MOST_EXTRA = 64  # maximum of unknown bytes in a part's header
SAME_TOKEN, SAME_MODEL = 0.5, 1.0
"""Maximum relative differences of K and V between two engines with the same model: in layer 0, where they depend on the
token alone, and in later layers. 4-bit weights differ from bfloat16 ones by a tenth there, and by half after 22 layers
of random weights; heads in another order, or other weights, by 1.4."""


@dataclass(frozen=True)
class Field:
    """A run of bytes: a header, or the rows [tokens, num_kv_heads, head_dim] of a layer's K or V."""

    name: str
    header: bytes = b""
    rows: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.header) if self.rows is None else 2 * self.rows.numel()


@dataclass(frozen=True)
class StateLayout:
    """Layout of the states of a model."""

    order: Tensor | None  # checkpoint's index of each of llama.cpp's head channels, [head_dim]; None for the identity
    extra: bytes = b""  # end of a part's header
    further: tuple[Tensor | None, ...] = ()  # see `KVReader.further`

    @classmethod
    def of(cls, spec: ModelSpec, rope_type: int, template: np.ndarray) -> StateLayout:
        """Return the layout of a model's states. template: a state that llama.cpp wrote."""
        start = template.tobytes()[: (1 << 16)].find(_row_header(spec))
        (cells,) = struct.unpack_from("<I", template.tobytes(), 12)
        known = 16 + 12 * cells + 8
        extra = template[known:start].tobytes() if 0 <= start - known <= MOST_EXTRA else b""
        further = tuple(_further(spec, spec.rope_of(layer)) for layer in range(spec.num_kv_layers))
        return cls(_channel_order(spec, rope_type), extra, further)

    @torch.inference_mode()
    def state_of(self, kv: KVReader) -> np.ndarray:
        """Return the state of a prompt as bytes, uint8 [n]."""
        parts = []
        for field in self._fields(kv):
            if field.rows is None:
                parts.append(np.frombuffer(field.header, np.uint8))
            else:
                rows = field.rows.cpu().to(torch.float16).contiguous()
                parts.append(rows.view(torch.uint8).reshape(-1).numpy())
        return np.concatenate(parts)

    def differences(self, kv: KVReader, theirs: np.ndarray) -> list[str]:
        """Return the differences between the state of this KV and llama.cpp's own state of the same tokens: headers,
        size, and the first K or V that differs."""
        ours, at, found = self.state_of(kv), 0, list[str]()
        for field in self._fields(kv):
            own, other = (state[at : at + field.num_bytes] for state in (ours, theirs))
            at += field.num_bytes
            if field.rows is None and not np.array_equal(own, other):
                return [*found, f"{field.name} ({own[:16].tobytes().hex()} here, {other[:16].tobytes().hex()} there)"]
            most = SAME_TOKEN if field.name.endswith(" of layer 0") else SAME_MODEL
            if field.rows is not None and not found and not (difference := _relative(own, other)) <= most:
                found.append(f"{field.name} (a relative difference of {difference:.2g})")
        if len(theirs) != len(ours):
            found.append(f"size ({len(ours)} bytes here, {len(theirs)} there)")
        return found

    def _fields(self, kv: KVReader) -> Iterator[Field]:
        kv = replace(kv, further=self.further)
        yield Field("magic and sequence", struct.pack("<Ii", MAGIC, 0))
        windows = [layer.attention.sliding_window for layer in kv.decoder.layers]
        for windowed in (False, True):
            layers = [i for i, window in enumerate(windows) if (window is not None) == windowed]
            if layers:
                yield from self._part(kv, layers)

    def _part(self, kv: KVReader, layers: list[int]) -> Iterator[Field]:
        positions, head = range(kv.start, kv.num_tokens), _row_header(kv.decoder.spec)
        yield Field("number of streams and cells", struct.pack("<II", 1, len(positions)))
        cells = np.zeros((len(positions), 3), "<i4")
        cells[:, 0], cells[:, 1] = positions, 1
        yield Field("cells", cells.tobytes())
        yield Field("order of V and number of layers", struct.pack("<II", 0, len(layers)) + self.extra)
        for index in layers:
            yield Field("type and row size of K", head)
            k = kv.layer(index).k
            k = k if self.order is None else k.index_select(-1, self.order.to(k.device))
            yield Field(f"K of layer {index}", rows=k)
        for index in layers:
            yield Field("type and row size of V", head)
            yield Field(f"V of layer {index}", rows=kv.layer(index).v)


def _further(spec: ModelSpec, rope: Mapping[str, Any] | None) -> Tensor | None:
    """Return `KVReader.further` of a layer. ggml rounds the range of YaRN's ramp to whole dimensions
    (`ggml_rope_yarn_corr_dims`), which gpt-oss does not (`truncate`): angles differ by up to .4 radians after 2,000
    tokens, and not measurably after a few."""
    if rope is None or rope["rope_type"] != "yarn" or rope.get("truncate", True):
        return None
    ours, theirs = (
        inverse_frequencies(parameters, rotated_dim(rope, spec.head_dim), spec.max_position_embeddings, 1)[0]
        for parameters in (rope, {**rope, "truncate": True})
    )
    half = torch.nn.functional.pad(theirs - ours, (0, spec.head_dim // 2 - len(ours)))
    return torch.cat((half, half))


def _row_header(spec: ModelSpec) -> bytes:
    return struct.pack("<iQ", GGML_TYPE_F16, 2 * spec.num_kv_heads * spec.head_dim)


def _channel_order(spec: ModelSpec, rope_type: int) -> Tensor | None:
    if rope_type not in (ROPE_NORM, ROPE_NEOX) or spec.interleaved == (rope_type == ROPE_NORM):
        return None
    pairs = torch.arange(spec.rotated_dim)
    turned = pairs.view(-1, 2).T if spec.interleaved else pairs.view(2, -1).T
    return torch.cat((turned.reshape(-1), torch.arange(spec.rotated_dim, spec.head_dim)))


def _relative(own: np.ndarray, other: np.ndarray) -> float:
    a, b = (np.frombuffer(part.tobytes(), np.float16).astype(np.float32) for part in (own, other))
    if np.array_equal(a, b):
        return 0.0
    size = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / size if len(a) == len(b) and size else float("inf")
