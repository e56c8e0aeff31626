"""Choice of the engine that decodes: llama.cpp if the settings demand it or it is faster, after its KV was compared
with ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cacheblend_cli import user_cache
from cacheblend_cli.engine.connectors.llama_cpp import LlamaCpp
from cacheblend_cli.engine.connectors.llama_library import LlamaError, installed, library
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.worker import TableInput, Worker
from cacheblend_cli.kv.export import export
from cacheblend_cli.kv.forward import forward
from cacheblend_cli.kv.pool import PagedSequence, upload
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.model.machine_speeds import cpu_features, cpu_name
from cacheblend_cli.model.read_ahead import remember
from cacheblend_cli.version import __version__

if TYPE_CHECKING:
    from cacheblend_cli.engine.core.sequence import Sequence

FORMAT = 3
TOKENS, STEPS = 8, 8
PROBE_TIMEOUT_S = 600


@dataclass(frozen=True)
class DecodeSpeeds:
    """Seconds per decoded token after a short prompt."""

    own_s: float  # this engine's
    llama_cpp_s: float
    error: str | None = None  # why llama.cpp cannot run
    load_s: float = 0.0  # seconds to load and check llama.cpp's weights, 0 before the first time

    @property
    def worth_after(self) -> float:
        """Number of tokens over which llama.cpp gains its loading time; 0 if it is not faster. Loading it after so many
        costs at most twice the better choice, whatever the length of the answer."""
        saved_s = self.own_s - self.llama_cpp_s
        return self.load_s / saved_s if saved_s > 0 and self.error is None else 0.0

    def __str__(self) -> str:
        if self.error is not None:
            return self.error
        return f"{1 / self.own_s:.3g} tokens/s here, {1 / self.llama_cpp_s:.3g} by llama.cpp"


class NotTried(LlamaError):
    """llama.cpp could not be tried: its process did not start, or took too long."""


def llama_engine(runtime: Runtime) -> LlamaCpp | None:
    """Return llama.cpp if it decodes for this runtime, loaded on first use; else None, with a message if it was
    requested and refused."""
    choice = runtime.decode_with
    if not choice.decided:
        choice.decided = True
        try:
            choice.engine = None if choice.file is None else _loaded(runtime, choice.file, measured=choice.measured)
        except LlamaError as error:
            runtime.say(f"{error.message}; cacheblend decodes by itself")
        remember(runtime.config, "decoder", [] if choice.engine is None else [choice.engine.file])
    return choice.engine


def _loaded(runtime: Runtime, file: Path, *, measured: bool) -> LlamaCpp | None:
    """Return llama.cpp with a file whose KV is this model's; None if it is `measured` and slower. Raises LlamaError."""
    speeds = decode_speeds(runtime)
    if speeds.error is not None:
        raise LlamaError(f"llama.cpp is not used here: {speeds.error}")
    if measured and speeds.own_s <= speeds.llama_cpp_s:
        return None
    start = time.perf_counter()
    llama = LlamaCpp(library(), file, torch.get_num_threads())
    with _ShortPrompt(runtime) as prompt:
        try:
            llama.check(prompt.token_ids, export(runtime.decoder, prompt.sequence, TOKENS))
        except LlamaError as error:
            if measured:  # loading the file again would find the same
                _keep(runtime, replace(speeds, error=error.message))
            raise
    if measured and not speeds.load_s:  # the measurement has just read the file, as for later starts
        _keep(runtime, replace(speeds, load_s=time.perf_counter() - start))
    return llama


def hand_over(runtime: Runtime, worker: Worker, sequence: Sequence) -> bool:
    """Return whether llama.cpp decodes this sequence, and hand its KV over before the first token. An answer that is
    compared with a full prefill (--verify), and the full prefill, are decoded by this engine."""
    state, paged = sequence.state, sequence.paged
    if state.parent is not None or state.request.options.verify:
        return False
    if sequence.handed is None and _loads_later(runtime, sequence):
        return False
    llama = llama_engine(runtime)
    if llama is None or paged is None or sequence in runtime.decode_with.refused:
        return False
    if sequence.handed is None:
        headroom = max(1, state.max_new_tokens - (sequence.kv_len - state.request.plan.num_tokens))
        kv = worker.export_kv(TableInput.of(paged), sequence.kv_len)
        try:
            sequence.handed = llama.hand_over(sequence.token_ids[: sequence.kv_len], kv, headroom)
        except LlamaError as error:
            runtime.decode_with.refused.add(sequence)
            state.request.notes.append(f"{error.message}; cacheblend decodes by itself")
            return False
    return True


def _loads_later(runtime: Runtime, sequence: Sequence) -> bool:
    """Return whether llama.cpp is not loaded yet, and the answer is still too short for loading it to pay."""
    choice = runtime.decode_with
    if choice.decided or not choice.measured:
        return False
    if choice.worth_after is None:
        with suppress(LlamaError):
            choice.worth_after = decode_speeds(runtime).worth_after
    return sequence.kv_len - sequence.state.request.plan.num_tokens < (choice.worth_after or 0.0)


def describe(runtime: Runtime) -> dict[str, str | int]:
    """Return facts for `doctor`; this makes the choice."""
    refused = list[str]()
    say, runtime.say = runtime.say, refused.append
    try:
        llama = llama_engine(runtime)
        facts: dict[str, str | int] = {"decode_speeds": str(decode_speeds(runtime))}
    finally:
        runtime.say = say
    if llama is None:
        return {"decoded_by": "; ".join(["cacheblend", *refused]), **facts}
    beside = "beside the weights above"
    return {
        "decoded_by": f"llama.cpp ({llama.library.name}), {llama.file}, {beside}",
        "llama_cpp_bytes": llama.file.stat().st_size,
        **facts,
    }


def decode_speeds(runtime: Runtime) -> DecodeSpeeds:
    """Return the speeds for this machine, model, file and number of threads, measured once and cached. Raises
    LlamaError if llama.cpp's library is missing."""
    path, threads = _place(runtime), torch.get_num_threads()
    with suppress(ValueError, TypeError):
        return DecodeSpeeds(**json.loads(user_cache.recall(path)))
    runtime.progress("measuring which decodes faster, cacheblend or llama.cpp: once on this machine")
    try:
        llama_cpp_s = _probe(str(runtime.decode_with.file), threads)
    except NotTried as error:  # nothing was learnt about the machine
        return DecodeSpeeds(0.0, 0.0, error.message)
    except LlamaError as error:
        speeds = DecodeSpeeds(0.0, 0.0, error.message)
    else:
        with _ShortPrompt(runtime) as prompt:
            speeds = DecodeSpeeds(prompt.decode_s(), llama_cpp_s)
    _keep(runtime, speeds)
    return speeds


def _keep(runtime: Runtime, speeds: DecodeSpeeds) -> None:
    user_cache.keep(_place(runtime), json.dumps(vars(speeds)))


def _place(runtime: Runtime) -> Path:
    """Return the cache file of the speeds. Raises LlamaError if llama.cpp's library is missing."""
    found, file = installed(), runtime.decode_with.file
    if found is None or file is None:
        raise LlamaError("llama.cpp's library is missing")
    stat = file.stat()
    cpu = cpu_name(), *cpu_features(), os.cpu_count(), torch.get_num_threads()
    machine = *cpu, str(runtime.decoder.device), torch.__version__, __version__, found[0]
    model = runtime.model.fingerprint, runtime.model.weight_dtype, str(file), stat.st_size, stat.st_mtime_ns
    return user_cache.place("decoding", FORMAT, *machine, *model)


def _probe(file: str, num_threads: int) -> float:
    """Return llama.cpp's seconds per decoded token. Raises LlamaError if it fails or its process dies, NotTried if the
    process does not start or end."""
    command = [sys.executable, "-P", "-m", "cacheblend_cli.engine.connectors.llama_cpp", file, str(num_threads)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotTried(f"it could not be tried: {error}") from error
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        raise LlamaError(f"the library of this package ends with {name} on this CPU (another build may not)")
    found: dict[str, float | str] = {"error": f"it could not be tried: {ended.stderr.strip()[-200:]}"}
    with suppress(ValueError, IndexError):
        found = json.loads(ended.stdout.splitlines()[-1])
    if "error" in found:
        raise LlamaError(str(found["error"]))
    return float(found["decode_s"])


class _ShortPrompt:
    """A few tokens, spread over the vocabulary, prefilled within the context."""

    def __init__(self, runtime: Runtime) -> None:
        self._decoder, self._memory = runtime.decoder, runtime.memory_for(1)
        size = self._decoder.spec.vocab_size
        self.token_ids = [i * size // TOKENS for i in range(TOKENS)]
        self.sequence: PagedSequence = self._memory.pool.new_sequence(TOKENS + STEPS)

    @torch.inference_mode()
    def __enter__(self) -> _ShortPrompt:
        positions = torch.arange(TOKENS, device=self._decoder.device)
        rows = rows_of(self._decoder, self.sequence, positions, TOKENS, TOKENS)
        forward(self._decoder, rows, upload(self.token_ids, self._decoder.device))
        return self

    def __exit__(self, *error: object) -> None:
        self.sequence.release()

    def decode_s(self) -> float:
        """Return the seconds per decoded token, the best of a few steps."""
        token, best = upload(self.token_ids[:1], self._decoder.device), float("inf")
        for step in range(STEPS):
            start = time.perf_counter()
            self._memory.runner.begin([self.sequence], [TOKENS + step], 1)
            self._memory.runner.step(token).argmax().item()  # waits for the device
            best = min(best, time.perf_counter() - start)
        return best
