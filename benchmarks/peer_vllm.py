"""Rows of `peers.py` for a vLLM server that already runs: alone, and behind `cacheblend serve --decoder`.

    python benchmarks/peer_vllm.py URL FOLDER alone|blended [HAND-OVERS]

is one measured process: a client of the server at URL, which in the second case starts `cacheblend serve` first. It
prints {"loaded", "first", "last"} as the programs of `peer_programs.py` do; loaded: when the request is sent.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from machine import ROOT
from peer_models import ANSWER_TOKENS, CLI, QUESTION, Models, environment

PRECISION, RATIO = "bfloat16", 0.15
START_S = 900
SERVED = {f"cacheblend {PRECISION}, query .15 + vLLM, served": "blended", f"vLLM {PRECISION}, served": "alone"}
"""Rows, and how the prompt gets to vLLM."""


class VllmServer:
    """A vLLM server with the connector of `cacheblend_vllm`, from `with` to its end. Its CPU time and memory are those
    of its session."""

    def __init__(self, models: Models, python: str) -> None:
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._models, self._python = models, python

    def __enter__(self) -> VllmServer:
        self._shared = Path(tempfile.mkdtemp(prefix="cacheblend-peers-", dir="/dev/shm"))
        transfer = {
            "kv_connector": "CacheBlendConnector", "kv_connector_module_path": "cacheblend_vllm.connector", "kv_role": "kv_consumer",
            "kv_load_failure_policy": "fail", "kv_connector_extra_config": {"directory": str(self._shared)},
        }  # fmt: skip
        flags = "--max-model-len 4096 --max-num-batched-tokens 4096 --max-num-seqs 1 --no-enable-prefix-caching --skip-tokenizer-init"
        command = [self._python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._models.checkpoint(PRECISION)),
                   "--dtype", PRECISION, *flags.split(), "--port", self.url.rsplit(":", 1)[1],
                   "--kv-transfer-config", json.dumps(transfer)]  # fmt: skip
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))  # all: by default one is kept free
        own = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cpus,
            "PYTHONPATH": str(ROOT / "connectors/vllm"),
        }
        self._log = self._models.folder / "vllm.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**environment(self._python), **own}, start_new_session=True
            )
        try:
            _wait(f"{self.url}/health", self._process, START_S)
        except BaseException:
            print(self._log.read_text(errors="replace")[-3000:], file=sys.stderr)
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._shared)

    def command(self, way: str) -> list[str]:
        """The command of a row of SERVED."""
        shared = [str(self._shared)] if way == "blended" else []
        return [sys.executable, __file__, self.url, str(self._models.folder), way, *shared]

    def cpu_s(self) -> float:
        """CPU seconds of its processes so far."""
        ticks = sum(sum(map(int, fields[11:13])) for fields in self._stats().values())
        return ticks / os.sysconf("SC_CLK_TCK")

    def forget_peaks(self) -> None:
        """Begin a new peak of memory. Raises PermissionError."""
        for pid in self._stats():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """Sum of the peak memory of its processes since `forget_peaks`."""
        peak = 0
        for pid in self._stats():
            with suppress(FileNotFoundError, ProcessLookupError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                peak += next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
        return peak / 1024

    def _stats(self) -> dict[int, list[str]]:
        """Fields of /proc/PID/stat behind the name, of every process of its session."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[3]) == self._process.pid:
                found[int(path.parent.name)] = fields
        return found


def alone(url: str, models: Models) -> dict[str, float]:
    """A completion of the prompt's ids by vLLM alone."""
    name = _get(f"{url}/v1/models")["data"][0]["id"]
    asked = {
        "model": name, "prompt": json.loads(models.ids.read_text()), "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    loaded, times = time.time(), list[float]()
    with _post(f"{url}/v1/completions", asked) as reply:
        for event in _events(reply):
            ids = [i for choice in event["choices"] for i in choice["token_ids"] or ()]
            times += [time.time()] * len(ids)
    assert len(times) == ANSWER_TOKENS, f"{len(times)} tokens"
    return {"loaded": loaded, "first": times[0], "last": times[-1]}


def blended(url: str, models: Models, shared: str) -> dict[str, float]:
    """The same prompt from stored chunks, by a `cacheblend serve` that is started for it."""
    base = f"http://127.0.0.1:{_free_port()}"
    flags = ["--port", base.rsplit(":", 1)[1], "--decoder", f"vllm:{url},{shared}", "--quiet"]
    serve = subprocess.Popen([*CLI, "serve", *models.machine(PRECISION), *flags], stdout=subprocess.DEVNULL)
    try:
        _wait(f"{base}/ready", serve, 100)
        asked = {
            "messages": [{"role": "user", "content": QUESTION}], "chunks": models.chunks(PRECISION).split(","),
            "blend": {"selector": "query", "ratio": RATIO}, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        loaded, answer = time.time(), dict[str, Any]()
        with _post(f"{base}/v1/chat/completions", asked) as reply:
            for event in _events(reply):
                answer |= {name: event[name] for name in ("blend", "usage") if name in event}
            last = time.time()
    finally:
        serve.terminate()
        serve.wait()
    assert answer["usage"]["completion_tokens"] == ANSWER_TOKENS, answer["usage"]
    notes = answer["blend"]["notes"]
    assert not notes, notes  # one would say that the answer was decoded here
    # Not when a first text is seen: random weights give tokens that may not be texts.
    return {"loaded": loaded, "first": loaded + answer["blend"]["timing"]["ttft_s"], "last": last}


def _events(reply: Any) -> Iterator[dict[str, Any]]:
    """Objects of a stream, when they come."""
    for line in reply:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return json.load(reply)


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=600)


def _wait(url: str, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Return when the server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.02)
    raise RuntimeError(f"{url} does not answer")


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def main(url: str, folder: str, way: str, *shared: str) -> None:
    models = Models(Path(folder))
    print(json.dumps(alone(url, models) if way == "alone" else blended(url, models, *shared)))


if __name__ == "__main__":
    main(*sys.argv[1:])
