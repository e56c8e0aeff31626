"""llama.cpp as the decoding engine: it takes a prompt's KV as its own state, and returns logits of later tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cacheblend_cli.engine.connectors.llama_cpp.library import LEAST_BATCH, Batch, Library, LlamaError
from cacheblend_cli.engine.connectors.llama_cpp.state import StateLayout
from cacheblend_cli.kv.export import KVReader

PROBED = 8
"""Tokens of a trial. A batch of this size uses ggml's code for many rows."""
CELLS = 256  # llama.cpp rounds a context up to multiples of this


@dataclass(eq=False)
class LlamaSequence:
    """A sequence with KV in llama.cpp."""

    engine: LlamaCpp
    index: int
    num_tokens: int  # positions with KV

    def release(self) -> None:
        self.engine.drop(self)


class LlamaCpp:
    """A GGUF file loaded by llama.cpp, and the sequences that it decodes together. Not thread-safe.

    One context holds all sequences; it is replaced by a larger one when tokens or sequences no longer fit. Sequences
    that are decoded together affect each other's logits by rounding only."""

    def __init__(self, library: Library, file: Path, num_threads: int) -> None:
        self.library, self.file, self._num_threads = library, file, num_threads
        self._model = library.load_model(file)
        self.vocab_size = int(library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model)))
        self.max_context = int(library.llama_model_n_ctx_train(self._model))
        self._rope_type = int(library.llama_model_rope_type(self._model))
        self._layout: StateLayout | None = None
        self._context = self._num_cells = self._num_places = 0
        self._batch = Batch()
        self._live: dict[int, LlamaSequence] = {}

    def check(self, token_ids: Sequence[int], kv: KVReader) -> None:
        """Compare KV of some tokens with llama.cpp's own. Raises LlamaError, naming the difference."""
        spec = kv.decoder.spec
        if self.vocab_size != spec.vocab_size:
            raise LlamaError(
                f"{self.file.name} has a vocabulary of {self.vocab_size} tokens; the model has {spec.vocab_size}",
                "decode with a file of the same model",
            )
        window, windows = int(self.library.llama_model_n_swa(self._model)), set(spec.sliding_windows) - {None}
        if windows != ({window} if window else set()):
            raise LlamaError(
                f"the sliding window of {self.file.name} is {window or 'none'} in llama.cpp, and "
                f"{', '.join(map(str, windows)) or 'none'} in the model"
            )
        count = len(token_ids)
        self._fit(count, 1)
        memory = self.library.llama_get_memory(self._context)
        self._run(token_ids, range(count), [0] * count)
        own = [self._state(0)]  # of all tokens, and of half of them, to verify what is taken for a constant
        self.library.llama_memory_seq_rm(memory, 0, count // 2, -1)
        own.append(self._state(0))
        self.library.llama_memory_seq_rm(memory, 0, -1, -1)
        layout = StateLayout.of(spec, self._rope_type, own[0])
        for length, theirs in zip((count, count // 2), own, strict=True):
            if found := layout.differences(replace(kv, num_tokens=length), theirs):
                raise LlamaError(
                    f"KV of {self.file.name} in llama.cpp ({self.library.name}) differs from the model's: {'; '.join(found)}",
                    "decode with a file of the same model, or install another version of llama.cpp",
                )
        self._layout = layout

    def hand_over(self, token_ids: Sequence[int], kv: KVReader, headroom: int = 0) -> LlamaSequence:
        """Return a sequence with this KV. headroom: tokens to decode after it. Raises LlamaError."""
        if kv.num_tokens + headroom > self.max_context:
            raise LlamaError(
                f"prompt and answer ({kv.num_tokens + headroom} tokens) exceed the context of {self.file.name} ({self.max_context})"
            )
        self._fit(kv.num_tokens + headroom, 1)
        index = next(i for i in range(self._num_places) if i not in self._live)
        sequence = LlamaSequence(self, index, kv.num_tokens)
        assert self._layout is not None, "check comes first"
        self._put(self._context, index, self._layout.state_of(kv))
        self._live[index] = sequence
        return sequence

    def decode(self, sequences: Sequence[LlamaSequence], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to each sequence, at least one. Returns fp32 logits after each of them, [num_rows, vocab_size].
        Raises LlamaError."""
        ids, positions, indexes = list[int](), list[int](), list[int]()
        for sequence, own in zip(sequences, tokens, strict=True):
            ids += own
            positions += range(sequence.num_tokens, sequence.num_tokens + len(own))
            indexes += [sequence.index] * len(own)
        self._fit(len(ids), 0)
        logits = self._run(ids, positions, indexes)
        for sequence, own in zip(sequences, tokens, strict=True):
            sequence.num_tokens += len(own)
        return logits

    def cut(self, sequence: LlamaSequence, num_tokens: int) -> None:
        """Remove the KV of a sequence from position num_tokens on. Raises LlamaError."""
        if sequence.num_tokens > num_tokens:
            memory = self.library.llama_get_memory(self._context)
            if not self.library.llama_memory_seq_rm(memory, sequence.index, num_tokens, -1):
                raise self.library.error("llama.cpp cannot remove KV from the end of a sequence")
            sequence.num_tokens = num_tokens

    def drop(self, sequence: LlamaSequence) -> None:
        if self._live.get(sequence.index) is sequence:
            del self._live[sequence.index]
            self.library.llama_memory_seq_rm(self.library.llama_get_memory(self._context), sequence.index, -1, -1)

    def try_out(self) -> None:
        """Compute batches of several tokens and of one, for which ggml has separate code. Only before the first
        sequence. Raises LlamaError."""
        assert not self._live
        self._fit(PROBED + 1, 1)
        self._run([i * self.vocab_size // PROBED for i in range(PROBED)], range(PROBED), [0] * PROBED)
        self._run([0], [PROBED], [0])
        self.library.llama_memory_seq_rm(self.library.llama_get_memory(self._context), 0, -1, -1)

    @property
    def num_sequences(self) -> int:
        return len(self._live)

    def close(self) -> None:
        """Free context and model, and with them all sequences."""
        self._live.clear()
        self._free(self._context, self._batch)
        if self._model:
            self.library.llama_model_free(self._model)
        self._context = self._model = self._num_cells = self._num_places = 0

    def _run(self, tokens: Sequence[int], positions: Sequence[int], indexes: Sequence[int]) -> Tensor:
        most = max(LEAST_BATCH, self._num_places)
        if len(tokens) > most:
            parts = [slice(start, start + most) for start in range(0, len(tokens), most)]
            return torch.cat([self._run(tokens[part], positions[part], indexes[part]) for part in parts])
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, (token, position, index) in enumerate(zip(tokens, positions, indexes, strict=True)):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, position, 1, 1
            batch.seq_id[row][0] = index
        failed = self.library.llama_decode(self._context, batch)
        if failed:
            raise self.library.error(f"llama.cpp failed to decode {len(tokens)} tokens (code {failed})")
        logits = torch.empty(len(tokens), self.vocab_size)
        for row, held in enumerate(logits.numpy()):
            found = self.library.llama_get_logits_ith(self._context, row)
            if not found:
                raise self.library.error("llama.cpp gives no logits")
            held[:] = np.ctypeslib.as_array(found, (self.vocab_size,))
        return logits

    def _fit(self, num_tokens: int, num_sequences: int) -> None:
        """Make room for more tokens and sequences. Raises LlamaError if memory is short; existing sequences stay."""
        cells = sum(s.num_tokens for s in self._live.values()) + num_tokens
        places = len(self._live) + num_sequences
        if cells <= self._num_cells and places <= self._num_places:
            return
        if self._live:  # more are likely to come
            cells, places = max(cells, 2 * self._num_cells), max(places, 2 * self._num_places)
        cells, places = -(-max(cells, self._num_cells) // CELLS) * CELLS, max(places, self._num_places)
        held = {index: self._state(index) for index in self._live}
        if not held:  # free the old context before creating the new one
            self._free(self._context, self._batch)
            self._context = self._num_cells = self._num_places = 0
        context = self.library.new_context(self._model, cells, places, self._num_threads)
        try:
            for index, state in held.items():
                self._put(context, index, state)
        except LlamaError:
            self.library.llama_free(context)
            raise
        if self._context:
            self._free(self._context, self._batch)
        self._context, self._num_cells, self._num_places = context, cells, places
        self._batch = self.library.llama_batch_init(max(LEAST_BATCH, places), 0, 1)

    def _free(self, context: int, batch: Batch) -> None:
        if context:
            self.library.llama_free(context)
            self.library.llama_batch_free(batch)

    def _state(self, index: int) -> np.ndarray:
        size = int(self.library.llama_state_seq_get_size(self._context, index))
        state = np.empty(size, np.uint8)
        if self.library.llama_state_seq_get_data(self._context, state.ctypes.data, size, index) != size:
            raise self.library.error("llama.cpp gives no state of a sequence")
        return state

    def _put(self, context: int, index: int, state: np.ndarray) -> None:
        if self.library.llama_state_seq_set_data(context, state.ctypes.data, len(state), index) != len(state):
            raise self.library.error("llama.cpp refuses the prompt's KV")
