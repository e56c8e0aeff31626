"""llama.cpp as a second decoder: used if the settings demand it or it is faster, after comparing its KV with ours."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

import torch

from cacheblend_cli.engine.connectors.llama_cpp.library import LlamaError, library
from cacheblend_cli.engine.connectors.llama_cpp.llama import LlamaCpp, LlamaSequence
from cacheblend_cli.engine.connectors.llama_cpp.speeds import TOKENS, ShortPrompt, decode_speeds, keep
from cacheblend_cli.engine.core.sequence import Sequence
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.sampling import Draw
from cacheblend_cli.engine.worker.worker import DecodeOutput, TableInput, Worker
from cacheblend_cli.kv.export import export
from cacheblend_cli.model.read_ahead import remember


class LlamaDecoder:
    """Decodes with a GGUF file in llama.cpp, loaded for the first answer that it may decode. measured: only if
    llama.cpp is faster, and only from the token on at which loading the file pays off."""

    def __init__(self, runtime: Runtime, file: Path, *, measured: bool = False) -> None:
        self._runtime, self.file, self.measured = runtime, file, measured
        self.decided = False
        self._llama: LlamaCpp | None = None
        self._worth_after: float | None = None  # tokens of an answer, None until it was looked up
        self._refused = WeakSet[Sequence]()  # they are decoded here

    @property
    def note(self) -> str | None:
        """Message about the cost of decoding in another engine."""
        if self.decided and self._llama is None:
            return None
        may = "" if self._llama is not None or not self.measured else " where that is faster"
        size = self.file.stat().st_size / 2**20
        return (
            f"llama.cpp decodes with {self.file.name}{may}: memory holds the weights a second time ({size:,.0f} MiB), and KV of "
            "running answers"
        )

    def loaded(self) -> LlamaCpp | None:
        """Return llama.cpp if it decodes, loaded on first use; else None, with a message if it was requested."""
        if not self.decided:
            self.decided = True
            try:
                self._llama = self._load()
            except LlamaError as error:
                self._runtime.say(f"{error.message}; cacheblend decodes by itself")
            remember(self._runtime.config, "decoder", [] if self._llama is None else [self.file])
        return self._llama

    def _load(self) -> LlamaCpp | None:
        """Load llama.cpp and check that its KV equals this model's. Returns None if it was `measured` to be slower.
        Raises LlamaError."""
        runtime, speeds = self._runtime, decode_speeds(self._runtime, self.file)
        if speeds.error is not None:
            raise LlamaError(f"llama.cpp is not used here: {speeds.error}")
        if self.measured and speeds.own_s <= speeds.llama_cpp_s:
            return None
        start = time.perf_counter()
        llama = LlamaCpp(library(), self.file, torch.get_num_threads())
        with ShortPrompt(runtime) as prompt:
            try:
                llama.check(prompt.token_ids, export(runtime.decoder, prompt.sequence, TOKENS))
            except LlamaError as error:
                if self.measured:  # loading the file again would find the same
                    keep(runtime, self.file, replace(speeds, error=error.message))
                raise
        if self.measured and not speeds.load_s:  # the measurement has just read the file, as for later starts
            keep(runtime, self.file, replace(speeds, load_s=time.perf_counter() - start))
        return llama

    def takes(self, sequence: Sequence, worker: Worker) -> bool:
        if sequence.elsewhere is not None:
            return True
        state, paged = sequence.state, sequence.paged
        num_generated = sequence.kv_len - state.num_tokens
        if self._loads_after(num_generated) or paged is None or sequence in self._refused:
            return False
        if (llama := self.loaded()) is None:
            return False
        headroom = max(1, state.max_new_tokens - num_generated)
        try:
            kv = worker.export_kv(TableInput.of(paged), sequence.kv_len)
            sequence.elsewhere = llama.hand_over(sequence.token_ids[: sequence.kv_len], kv, headroom)
        except LlamaError as error:
            self._refused.add(sequence)
            state.request.notes.append(f"{error.message}; cacheblend decodes by itself")
        return sequence.elsewhere is not None

    def _loads_after(self, num_generated: int) -> bool:
        """Return whether llama.cpp is not loaded yet and the answer is still too short to justify loading it."""
        if self.decided or not self.measured:
            return False
        if self._worth_after is None:
            with suppress(LlamaError):
                self._worth_after = decode_speeds(self._runtime, self.file).worth_after
        return num_generated < (self._worth_after or 0.0)

    def batches(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        return [sequences]

    def decode(self, sequences: list[Sequence], pending: Mapping[Sequence, Draw]) -> DecodeOutput:
        assert not pending, "steps are scheduled one by one with another decoder"
        held = [s.elsewhere for s in sequences if isinstance(s.elsewhere, LlamaSequence)]
        logits = held[0].engine.decode(held, [s.next_token for s in sequences])
        return DecodeOutput(logits.to(self._runtime.decoder.device), [None] * len(sequences))

    def describe(self) -> dict[str, str | int]:
        """Return facts for `doctor`, after choosing the decoder."""
        refused, runtime = list[str](), self._runtime
        say, runtime.say = runtime.say, refused.append
        try:
            llama = self.loaded()
            facts: dict[str, str | int] = {"decode_speeds": str(decode_speeds(runtime, self.file))}
        finally:
            runtime.say = say
        if llama is None:
            return {"decoded_by": "; ".join(["cacheblend", *refused]), **facts}
        beside = "beside the weights above"
        return {
            "decoded_by": f"llama.cpp ({llama.library.name}), {self.file}, {beside}",
            "llama_cpp_bytes": self.file.stat().st_size,
            **facts,
        }
