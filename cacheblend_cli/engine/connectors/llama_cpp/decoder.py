"""llama.cpp as a second decoder: used if the settings name it, after comparing its KV with ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from weakref import WeakSet

import torch

from cacheblend_cli.engine.connectors.llama_cpp.library import LlamaError, library
from cacheblend_cli.engine.connectors.llama_cpp.llama import LlamaCpp, LlamaSequence
from cacheblend_cli.engine.connectors.llama_cpp.trial import check_runs
from cacheblend_cli.engine.core.sequence import Sequence
from cacheblend_cli.engine.core.speculation import Drafts
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.sampling import Draw
from cacheblend_cli.engine.worker.worker import DecodeOutput, TableInput, Worker
from cacheblend_cli.kv.export import export
from cacheblend_cli.kv.forward import forward
from cacheblend_cli.kv.pool import upload
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.model.read_ahead import remember

COMPARED = 8  # tokens that both engines compute before the first answer


class LlamaDecoder:
    """Decodes with a GGUF file in llama.cpp, loaded for the first answer. If that fails, this engine decodes all
    answers."""

    def __init__(self, runtime: Runtime, file: Path) -> None:
        self._runtime, self.file = runtime, file
        self._tried = False
        self._llama: LlamaCpp | None = None
        self._refused = WeakSet[Sequence]()  # they are decoded here

    @property
    def note(self) -> str | None:
        """Message about the cost of decoding in another engine."""
        if self._tried and self._llama is None:
            return None
        return f"llama.cpp decodes with {self.file.name}: memory holds the KV of running answers a second time"

    def loaded(self) -> LlamaCpp | None:
        """Return llama.cpp, loaded on first use; None, with a message, if it cannot decode."""
        if not self._tried:
            self._tried = True
            try:
                self._llama = self._load()
            except LlamaError as error:
                self._runtime.say(f"{error.message}; cacheblend decodes by itself")
            remember(self._runtime.config, "decoder", [] if self._llama is None else [self.file])
        return self._llama

    @torch.inference_mode()
    def _load(self) -> LlamaCpp:
        """Load llama.cpp and compare its KV of a few tokens with this model's. Raises LlamaError."""
        decoder, num_threads = self._runtime.decoder, torch.get_num_threads()
        check_runs(self.file, num_threads, self._runtime.progress)
        llama = LlamaCpp(library(), self.file, num_threads)
        token_ids = [i * decoder.spec.vocab_size // COMPARED for i in range(COMPARED)]
        sequence = self._runtime.memory_for(1).pool.new_sequence(COMPARED)
        try:
            positions = torch.arange(COMPARED, device=decoder.device)
            rows = rows_of(decoder, sequence, positions, COMPARED, COMPARED)
            forward(decoder, rows, upload(token_ids, decoder.device))
            llama.check(token_ids, export(decoder, sequence, COMPARED))
        finally:
            sequence.release()
        return llama

    def takes(self, sequence: Sequence, worker: Worker) -> bool:
        if sequence.elsewhere is not None:
            return True
        state, paged = sequence.state, sequence.paged
        num_generated = sequence.kv_len - state.num_tokens
        if paged is None or sequence in self._refused:
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

    def batches(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        return [sequences]

    def decode(self, sequences: list[Sequence], pending: Mapping[Sequence, Draw], drafts: Drafts) -> DecodeOutput:
        assert not pending, "steps are scheduled one by one with another decoder"
        held = [s.elsewhere for s in sequences if isinstance(s.elsewhere, LlamaSequence)]
        engine = held[0].engine
        for own, sequence in zip(held, sequences, strict=True):
            engine.cut(own, sequence.kv_len)  # proposals that the answer did not take
        logits = engine.decode(held, [(s.next_token, *drafts.get(s, ())) for s in sequences])
        return DecodeOutput(logits.to(self._runtime.decoder.device), [None] * len(logits))

    def describe(self) -> dict[str, str | int]:
        """Return facts for `doctor`, after loading llama.cpp."""
        refused, runtime = list[str](), self._runtime
        say, runtime.say = runtime.say, refused.append
        try:
            llama = self.loaded()
        finally:
            runtime.say = say
        if llama is None:
            return {"decoded_by": "; ".join(["cacheblend", *refused])}
        return {
            "decoded_by": f"llama.cpp ({llama.library.name}), {self.file}",
        }
