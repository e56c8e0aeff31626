"""Collections: the parts of a chunk key other than the chunk. Chunks of one collection can share a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cacheblend_store import KeyParts, chunk_key, collection_id
from cacheblend_store.format.blobs import BlobSpec, blob_size, blob_spec, state_spec

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.prompt.template import PromptTemplate

if TYPE_CHECKING:
    import torch

    from cacheblend_cli.model.decoder import Decoder
    from cacheblend_cli.model.description import ModelDescription
    from cacheblend_cli.model.states import StateLayout

EXACT = "exact"
"""--kv-dtype exact: KV as computed, in the model's dtype."""
DEFAULT_CODEC = "int7"
"""--kv-dtype auto: the codec with the fewest bits and a KL of at most .0005 on three models (docs/fidelity.md)."""

LONGEST_RUN = 32768
"""Tokens of a document that a hybrid's chunks are collected behind: their KV is in memory meanwhile, 1 GiB of a 9B."""
_CHUNK = 512  # tokens of a chunk, the default: scales of a chunk count to its tokens


def dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def salt_digest(salt: str) -> str:
    """Return a digest that identifies a salt without storing it; "" for an empty salt."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"salt").hexdigest() if salt else ""


def codec_of(kv_dtype: str, dtype: torch.dtype | str, spec: ModelSpec) -> str:
    """Return the codec for a --kv-dtype setting. dtype: dtype of the model, or its name. A hybrid's KV is exact by
    default: it is small beside the states, and then an answer is that of a full prefill to the bit."""
    default = EXACT if spec.recurrent else DEFAULT_CODEC
    name = default if kv_dtype == "auto" else kv_dtype
    return dtype_name(dtype) if name == EXACT else name


def kv_facts(spec: ModelSpec, kv_dtype: str, dtype: torch.dtype, memory_bytes: float) -> dict[str, Any]:
    """Return facts on the size of KV for reports.

    kv_dtype: the setting. dtype: dtype of the model. memory_bytes: bytes of a token while a question is answered.
    """
    codec = codec_of(kv_dtype, dtype, spec)
    sizes = (t.num_bytes for heads in spec.kv_shapes for t in blob_spec(codec, _CHUNK, *heads).values())
    return {
        "kv_bytes_per_token": round(sum(sizes) / _CHUNK),
        "kv_dtype": codec,
        "kv_bytes_per_token_in_memory": int(memory_bytes),
    }


@dataclass(frozen=True)
class Collection:
    """All parts of a chunk key except the chunk and its left context."""

    model: ModelDescription
    template: PromptTemplate  # only its prefix is part of the key
    codec: str
    salt: str
    computed_in: str = ""  # dtype in which the chunks were computed; "": the dtype of the model

    @classmethod
    def of(cls, model: ModelDescription, template: PromptTemplate, kv_dtype: str, salt: str) -> Collection:
        return cls(model, template, codec_of(kv_dtype, model.dtype, model.spec), salt)

    @property
    def decoder(self) -> Decoder:
        """The model's decoder, loaded on first use."""
        return self.model.loaded.decoder

    def in_codec(self, kv_dtype: str) -> Collection:
        return Collection.of(self.model, self.template, kv_dtype, self.salt)

    def in_other_dtypes(self) -> list[Collection]:
        """Return the collections with KV that this model computed in another dtype: it is close enough to use."""
        own = self.model.fingerprint
        return [replace(self, computed_in=name) for name, there in self.model.fingerprints.items() if there != own]

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        return self.template.prefix_ids

    @property
    def day(self) -> date | None:
        """Date in the prefix, None without one."""
        return self.template.day

    @property
    def salt_digest(self) -> str:
        return salt_digest(self.salt)

    def check_chunk_tokens(self, chunk_tokens: int) -> None:
        """Raise UsageError if chunks of this size do not fit the model's context after the prefix."""
        room = self.model.spec.max_context - len(self.prefix_ids)
        if chunk_tokens > room:
            raise UsageError(
                f"--chunk-tokens {chunk_tokens} is more than the {room} tokens that fit the context of {self.model.name} "
                "after the prompt's prefix",
                f"use --chunk-tokens {min(512, room)}",
            )

    @cached_property
    def id(self) -> str:
        return collection_id(self._parts(self.prefix_ids, ()))

    def key(self, token_ids: Sequence[int], left: Sequence[int] = ()) -> bytes:
        return chunk_key(self._parts(self.prefix_ids, left), token_ids)

    def window(self, wanted: int) -> int:
        """Return the maximum number of tokens of a chunk and its left context: `wanted`, capped by two limits.

        The window must fit the model's context, and stay below the length at which RoPE changes its frequencies,
        because chunks of one window are collected together.
        """
        spec = self.model.spec
        if spec.recurrent:  # a state is right only behind the whole document so far
            wanted = LONGEST_RUN
        limit = min(spec.max_context, spec.rope_switches_at or spec.max_context)
        return min(wanted, limit - len(self.prefix_ids))

    @property
    def prefix_key(self) -> bytes:
        return chunk_key(self._parts((), ()), self.prefix_ids)

    @property
    def prefix_codec(self) -> str:
        """Codec of the prefix's KV: exact, because every prompt has it and most attention goes to its first tokens."""
        return self.model.dtype

    @property
    def prefix_bytes(self) -> int:
        return sum(map(blob_size, self._layers(len(self.prefix_ids), self.prefix_codec))) + sum(self._state_bytes)

    def chunk_bytes(self, num_tokens: int, codec: str = "") -> int:
        """Return the KV bytes of a chunk. codec: "" for this collection's."""
        return sum(t.num_bytes for layer in self._layers(num_tokens, codec) for t in layer.values())

    def stored_bytes(self, num_tokens: int, state_every: int = 1) -> int:
        """Return the total blob bytes of a chunk, as the store counts them. state_every: number of chunks of which one
        has a hybrid's state."""
        return sum(map(blob_size, self._layers(num_tokens))) + sum(self._state_bytes) // state_every

    def blob_sizes(self, num_tokens: int) -> list[int]:
        """Return the bytes of each blob of a chunk: one per layer, and one with a hybrid's state."""
        return [*map(blob_size, self._layers(num_tokens)), *self._state_bytes]

    @property
    def state_layout(self) -> StateLayout | None:
        """Layout of a hybrid's state, which is known when it is loaded."""
        return self.decoder.state_layout if self.model.spec.recurrent else None

    @cached_property
    def _state_bytes(self) -> list[int]:
        layout = self.state_layout
        return [] if layout is None else [blob_size(state_spec(layout.stored))]

    def _layers(self, num_tokens: int, codec: str = "") -> list[BlobSpec]:
        return [blob_spec(codec or self.codec, num_tokens, *heads) for heads in self.model.spec.kv_shapes]

    def _parts(self, prefix_ids: Sequence[int], left: Sequence[int]) -> KeyParts:
        model = self.model
        fingerprint = model.fingerprints[self.computed_in] if self.computed_in else model.fingerprint
        return KeyParts(fingerprint, model.tokenizer.fingerprint, prefix_ids, left, self.codec, self.salt)
