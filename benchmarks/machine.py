"""What the scripts share: the machine and what other processes use of it, a checkpoint of random weights, servers, and
results: JSON with a page of Markdown beside it."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CLI = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()"]
MOST_USED = 0.2
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
VNNI = {"MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}
"""Environments that limit cacheblend, torch, MKL and oneDNN to AVX2, and to AVX-512 with VNNI."""
"""CPUs that other processes may use during a run whose figures are kept."""

sys.path.append(str(ROOT))  # for tools.wrap
from tools.wrap import wrapped  # noqa: E402


class Others:
    """CPU time of other processes since construction, in CPUs (1.0 = one core). Child processes count as ours once
    reaped."""

    def __init__(self) -> None:
        self._start = self._now()

    def used(self) -> float:
        wall, busy, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return max(0.0, busy - own) / wall

    def conditions(self) -> dict[str, Any]:
        """Return date, hardware and CPUs used by other processes, as results name them."""
        return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "others": round(self.used(), 2), "hardware": hardware()}

    def _now(self) -> tuple[float, float, float]:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), busy, sum(usage.ru_utime + usage.ru_stime for usage in own)


def hardware() -> dict[str, Any]:
    """Return CPU, cores, memory, torch threads and torch version, as every result names them."""
    import torch

    from cacheblend_cli.evaluation.speed import device_name

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": device_name(torch.device("cpu")), "cores": os.cpu_count(), "memory_gib": round(memory, 1),
        "threads": torch.get_num_threads(), "torch": torch.__version__,
    }  # fmt: skip


def machine_name() -> str:
    """Return the CPU with the widest matrix or vector instructions it has, as "AMD EPYC, AVX512-BF16"."""
    flags = next((line.split() for line in Path("/proc/cpuinfo").read_text().splitlines() if line[:5] == "flags"), [])
    names = {"amx_tile": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}
    widest = next((name for flag, name in names.items() if flag in flags), "")
    return ", ".join(filter(None, (hardware()["cpu"], widest)))


def write_checkpoint(path: Path, config: Path, **fields: Any) -> Path:
    """Write a checkpoint of random weights in the shape of the config with these fields, with the demo model's
    tokenizer; in float32 unless `dtype` is among the fields."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from cacheblend_cli.demo import model_dir

    torch.manual_seed(0)
    path.mkdir(parents=True)
    settings = json.dumps(json.loads(config.read_text()) | fields)
    dtype = getattr(torch, fields.get("dtype", "float32"))
    (path / "config.json").write_text(settings)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    model.save_pretrained(path)
    (path / "config.json").write_text(settings)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(model_dir() / name, path / name)
    return path


def timed(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    work()
    return clock() - start


def memory_kib(name: str, pid: int | str = "self") -> int:
    """Return a field of a process's memory, such as VmHWM or RssAnon."""
    return int(re.findall(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])


@contextmanager
def served(
    flags: Sequence[str], log: Path, environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `cacheblend serve`. Yields the process, and its port once it answers."""
    command = [*CLI, "serve", "--port", "0", *flags]
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        while not (found := re.search(rb"http://127\.0\.0\.1:(\d+)", log.read_bytes())):
            if server.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        yield server, int(found[1])
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def read_result(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def save(result: dict[str, Any], path: Path, page: str) -> None:
    """Write a result and its page beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(wrapped(page), encoding="utf-8")


def fill(page: Path, **blocks: str) -> None:
    """Write the blocks between their marks in a page."""
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, block=block: f"{m[1]}\n{block}\n{m[2]}", text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
