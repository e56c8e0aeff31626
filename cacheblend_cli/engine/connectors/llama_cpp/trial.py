"""Trial of llama.cpp in a process of its own, before this one loads it.

Code that the machine cannot run then ends the other process: ggml's AMX code dies with SIGILL on some virtual machines.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cacheblend_cli import user_cache
from cacheblend_cli.engine.connectors.llama_cpp.library import LlamaError, installed, library
from cacheblend_cli.engine.connectors.llama_cpp.llama import LlamaCpp
from cacheblend_cli.model.machine_speeds import cpu_features, cpu_name

KIND = "llama.cpp"
TIMEOUT_S = 600


def check_runs(file: Path, num_threads: int, progress: Callable[[str], object]) -> None:
    """Load a GGUF file and compute with it in another process, unless that worked before with this CPU, library and
    file. Raises LlamaError if that process fails or dies, or the library is missing."""
    place = _place(file)
    if user_cache.recall(place):
        return
    progress(f"trying llama.cpp with {file.name} in a process of its own: once on this machine")
    command = [sys.executable, "-P", "-m", "cacheblend_cli.engine.connectors.llama_cpp.trial"]
    try:
        ended = subprocess.run(
            [*command, str(file), str(num_threads)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LlamaError(f"llama.cpp could not be tried: {error}") from error
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        raise LlamaError(f"llama.cpp's library ends with {name} on this CPU (another build may not)")
    if ended.returncode:
        *_, reason = ended.stderr.strip().split("\n")
        raise LlamaError(f"llama.cpp failed when it was tried: {reason}")
    user_cache.keep(place, "runs")


def _place(file: Path) -> Path:
    """Return the cache file of a successful trial. Raises LlamaError if llama.cpp's library is missing."""
    if (found := installed()) is None:
        raise LlamaError("llama.cpp's library is missing")
    name, path = found
    stats = [(stat.st_size, stat.st_mtime_ns) for stat in (path.stat(), file.stat())]
    return user_cache.place(KIND, cpu_name(), *cpu_features(), name, str(path), str(file), *stats)


if __name__ == "__main__":
    try:
        LlamaCpp(library(), Path(sys.argv[1]), int(sys.argv[2])).try_out()
    except LlamaError as error:
        sys.exit(error.message)
