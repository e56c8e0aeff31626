"""tools/gpu_pack.py: kernels compiled without a GPU are found by another checkout, and the commands fit."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]
SOURCES = ("tools", "benchmarks", "tests/support", "kernels", "store", "documents", "")

COMPILE = """
import sys
from pathlib import Path
import torch, triton
import gpu_kernels
from cacheblend_kernels.triton_backend.backend import TritonBackend

compiled = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **more: compiled.append((src.name, cache_hit))
with gpu_kernels.compiling(90, Path(sys.argv[1])):
    backend = TritonBackend(torch.device("cpu"), arch=90, num_sms=132)
    backend.rms_norm(torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16), 1e-5)
Path(sys.argv[1], "used").write_text("\\n".join(gpu_kernels.UsedCache.used))
print(gpu_kernels.__file__, *[f"{name}:{hit}" for name, hit in compiled])
"""


@pytest.fixture(scope="module")
def pack() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_pack", ROOT / "tools" / "gpu_pack.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled_by(checkout: Path, cache: Path, folder: Path) -> str:
    """Compile a kernel with the sources of a checkout. Returns where they were, and which kernels were hit."""
    folder.mkdir()
    paths = os.pathsep.join(str(checkout / part) for part in SOURCES)
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILE, str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_packed_kernels_are_hit_from_another_checkout(pack: ModuleType, tmp_path: Path) -> None:
    here, there, archive = tmp_path / "here", tmp_path / "there", tmp_path / "kernels.tar.xz"
    assert ":False" in compiled_by(ROOT, here, tmp_path / "first")
    names = (tmp_path / "first" / "used").read_text().split()
    kernel_cache = sys.modules[pack.write_archive.__module__]
    kernel_cache.write_archive(archive, here, names)
    kernel_cache.read_archive(archive, there)
    shutil.rmtree(here)
    other = tmp_path / "checkout"
    for part in ("tools", "benchmarks/gpu", "kernels", "tests/support"):
        shutil.copytree(ROOT / part, other / part, ignore=shutil.ignore_patterns("__pycache__"))
    told = compiled_by(other, there, tmp_path / "second")
    assert told.startswith(str(other))
    assert ":True" in told
    assert ":False" not in told


def test_the_commands_say_how_long_they_take_and_fit_a_call(pack: ModuleType) -> None:
    told = pack.commands(ROOT / ".gpu")
    found = re.findall(r"at most (\d+) s .*\n  (.*)", told)
    assert len(found) == 2
    assert sum(int(limit) for limit, _ in found) + 2 * pack.PREPARATION_S < 15 * 60
    for limit, command in found:
        assert len(command) < 2000
        assert "--pack .gpu" in command
        assert 60 * float(command.split()[-1]) < int(limit) <= 600
    assert "--resume --again" in found[1][1]


def test_the_wheels_are_pinned(pack: ModuleType) -> None:
    pins = pack.pins()
    assert [re.match(r"[\w-]+", pin)[0] for pin in pins] == sorted(pack.WHEELS)
    assert all("--hash=sha256:" in pin for pin in pins)
