"""Speeds of decoding here and in llama.cpp, measured once on a machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from cacheblend_cli import user_cache
from cacheblend_cli.engine.connectors.llama_cpp.library import LlamaError, installed
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.kv.forward import forward
from cacheblend_cli.kv.pool import PagedSequence, upload
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.model.machine_speeds import cpu_features, cpu_name
from cacheblend_cli.version import __version__

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


def decode_speeds(runtime: Runtime, file: Path) -> DecodeSpeeds:
    """Return the speeds for this machine, model, file and number of threads, measured once and cached. Raises
    LlamaError if llama.cpp's library is missing."""
    path, threads = _place(runtime, file), torch.get_num_threads()
    with suppress(ValueError, TypeError):
        return DecodeSpeeds(**json.loads(user_cache.recall(path)))
    runtime.progress("measuring which decodes faster, cacheblend or llama.cpp: once on this machine")
    try:
        llama_cpp_s = _probe(str(file), threads)
    except NotTried as error:  # nothing was learnt about the machine
        return DecodeSpeeds(0.0, 0.0, error.message)
    except LlamaError as error:
        speeds = DecodeSpeeds(0.0, 0.0, error.message)
    else:
        with ShortPrompt(runtime) as prompt:
            speeds = DecodeSpeeds(prompt.decode_s(), llama_cpp_s)
    keep(runtime, file, speeds)
    return speeds


def keep(runtime: Runtime, file: Path, speeds: DecodeSpeeds) -> None:
    user_cache.keep(_place(runtime, file), json.dumps(vars(speeds)))


def _place(runtime: Runtime, file: Path) -> Path:
    """Return the cache file of the speeds. Raises LlamaError if llama.cpp's library is missing."""
    if (found := installed()) is None:
        raise LlamaError("llama.cpp's library is missing")
    stat = file.stat()
    cpu = cpu_name(), *cpu_features(), os.cpu_count(), torch.get_num_threads()
    machine = *cpu, str(runtime.decoder.device), torch.__version__, __version__, found[0]
    model = runtime.model.fingerprint, runtime.model.weight_dtype, str(file), stat.st_size, stat.st_mtime_ns
    return user_cache.place("decoding", FORMAT, *machine, *model)


def _probe(file: str, num_threads: int) -> float:
    """Return llama.cpp's seconds per decoded token. Raises LlamaError if it fails or its process dies, NotTried if the
    process does not start or end."""
    command = [sys.executable, "-P", "-m", "cacheblend_cli.engine.connectors.llama_cpp.llama", file, str(num_threads)]
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


class ShortPrompt:
    """A few tokens, spread over the vocabulary, prefilled within the context."""

    def __init__(self, runtime: Runtime) -> None:
        self._decoder, self._memory = runtime.decoder, runtime.memory_for(1)
        size = self._decoder.spec.vocab_size
        self.token_ids = [i * size // TOKENS for i in range(TOKENS)]
        self.sequence: PagedSequence = self._memory.pool.new_sequence(TOKENS + STEPS)

    @torch.inference_mode()
    def __enter__(self) -> ShortPrompt:
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
