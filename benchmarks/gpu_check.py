"""Check and measure everything that needs a GPU within one total budget, most valuable first (gpu/README.md).

    python benchmarks/gpu_check.py [--pack FOLDER] [--minutes M] [--only PART,PART] [--out FOLDER]
    python benchmarks/gpu_check.py --device cpu --tiny --out /tmp/tiny

The parts, their order and their seconds are in `gpu/plan.py`. Each runs in processes of its own (`gpu/steps.py`); this
process never touches the GPU. If one of them dies, loses the device or writes nothing for 18 seconds, another continues
with the next case. gpu-DEVICE.json and .md in the output folder ($OUT if that is set, else benchmarks/results/) are
rewritten after each part; gpu-DEVICE.log has the processes' messages.

--pack: a folder of `tools/gpu_pack.py`, with wheels of missing packages and compiled kernels. --only: these parts
alone; the JSON's rows of the other parts stay, if they are of this device and these versions.

Exit code: 0; 1 if a number is wrong or a case failed; 2 if a package is missing or the rows are of other versions.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu.kernel_cache import read_archive
from gpu.log import Log, assemble, is_wrong
from gpu.plan import MINUTES, PLAN, Part
from gpu.report import markdown
from gpu.runner import Clock, Runner, Spawn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SOURCES = ("cacheblend_cli", "kernels", "store", "benchmarks/gpu")
# child processes get the path too, and so do theirs; tests/support has `kernel_references`
sys.path[:0] = [str(ROOT / part) for part in ("", "documents", "store", "kernels", "tests/support")]
NEEDED = ("numpy", "safetensors", "tokenizers", "jinja2", "xxhash", "lmdb", "msgspec", "platformdirs", "typer", "rich")
LARGE = ("torch", "transformers", "triton")  # only located here; the steps that use them import them
STORE_BYTES = 8 << 30


def main() -> int:
    arguments = parse()
    with ExitStack() as stack:
        if arguments.pack is not None:
            unpack(arguments.pack, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-pack-"))))
            compile_reads()
        if lacking := missing(arguments.device):
            print(f"error: what does not import: {', '.join(lacking)}; --pack FOLDER brings wheels", file=sys.stderr)
            return 2
        device, versions = whereabouts(arguments.device)
        stem = arguments.out / f"gpu-{slug(device)}{'-tiny' * arguments.tiny}"
        earlier = earlier_result(stem, f"{device}; {versions}; ") if arguments.only else {}
        if earlier is None:
            return 2
        arguments.out.mkdir(parents=True, exist_ok=True)
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-", dir=memory_folder(arguments)))
        )
        log = Log(folder / "log.jsonl")
        on = f"{device}; {versions}; code {code_version()}"
        begin(log, arguments, earlier)
        runner = Runner(log, spawner(arguments, log, folder, beside(stem, ".log")), 60 * arguments.minutes, Clock())
        runner.run(plan_of(arguments), announce, lambda: write(log, on, stem, arguments.tiny, earlier))
        return summary(write(log, on, stem, arguments.tiny, earlier), stem)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that any CPU takes")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for everything ({MINUTES:g})")
    parser.add_argument("--pack", type=Path, help="folder of tools/gpu_pack.py to install first, without a network")
    parser.add_argument("--only", default="", help="names of parts, with commas")
    parser.add_argument("--processes", type=int, help="for the kernel checks (half the cores, 8 at most)")
    out = Path(os.environ.get("OUT") or RESULTS)
    parser.add_argument("--out", type=Path, default=out, help="folder of the results")
    return parser.parse_args()


def plan_of(arguments: argparse.Namespace) -> list[Part]:
    """Return the parts, with no more processes than half the cores."""
    most = arguments.processes or max(1, (os.cpu_count() or 1) // 2)
    names = [part.name for part in PLAN] if not arguments.only else arguments.only.split(",")
    return [replace(part, processes=min(part.processes, most)) for part in PLAN if part.name in names]


def earlier_result(stem: Path, versions: str) -> dict[str, Any] | None:
    """Return the result to add to, {} without one; None if it is of other versions."""
    path = beside(stem, ".json")
    found = dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    if found and not found["on"].startswith(versions):
        print(f"error: {path} has rows of {found['on']}. This is: {versions}", file=sys.stderr)
        return None
    return found


def begin(log: Log, arguments: argparse.Namespace, earlier: dict[str, Any]) -> None:
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    row = {"cpu": cpu_name(), "cores": os.cpu_count(), "memory_gib": memory, "minutes": arguments.minutes}
    log.write("run", "environment", "ready")
    log.write("run", "environment", "row", part="environment", row=row)
    measured = {k: v for k, v in earlier.get("ceilings", {}).items() if k not in earlier["assumed"]}
    if measured:
        log.write("run", "ceilings", "row", part="ceilings", row=measured)


def unpack(pack: Path, folder: Path) -> None:
    """Install a pack's wheels into a folder in front of sys.path, and its kernels into one that Triton uses, also in
    child processes."""
    manifest = json.loads((pack / "manifest.json").read_text(encoding="utf-8"))
    for name, digest in manifest["files"].items():
        if hashlib.blake2b((pack / name).read_bytes(), digest_size=16).hexdigest() != digest:
            raise SystemExit(f"error: {pack / name} is damaged: pack it again")
    install(pack / "wheels", folder / "site")
    if (kernels := pack / "triton.tar.xz").exists():
        read_archive(kernels, folder / "triton")
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    for name, version in manifest["versions"].items():
        if version_of(name) != version:
            print(f"warning: packed for {name} {version}, here is {version_of(name) or 'none'}", file=sys.stderr)


def install(wheels: Path, site: Path) -> None:
    """Install wheels, and the metadata of this tree's version, which its installation would have."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        raise SystemExit(f"error: no wheels in {wheels}")
    options = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *found], check=True)
    sys.path.insert(0, str(site))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    metadata = site / f"cacheblend-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: cacheblend\nVersion: {version}\n", encoding="utf-8")


def compile_reads() -> None:
    """Build the store's compiled reads in place, if there is a compiler: wheels of the machine would have them."""
    source = ROOT / "store" / "cacheblend_store" / "compiled_reads.c"
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is not None:
        target = source.with_name("_compiled_reads.so")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)


def missing(device: str) -> list[str]:
    """Return packages that do not import, so that a run fails before it uses its time."""
    found = [name for name in LARGE[: 3 if device.startswith("cuda") else 2] if importlib.util.find_spec(name) is None]
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            found.append(f"{name} ({error})")
    return found


def whereabouts(device: str) -> tuple[str, str]:
    """Return the device's name and the versions that rows depend on."""
    versions = {"python": platform.python_version(), **{name: version_of(name) for name in LARGE}}
    name = cpu_name() if device == "cpu" else gpu_name()
    return name, ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def code_version() -> str:
    """Return a digest of the sources, which a copy of the tree without history has too, and the commit if known."""
    digest = hashlib.blake2b(digest_size=5)
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    commit = _first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    return " at ".join(filter(None, (digest.hexdigest(), commit)))


def gpu_name() -> str:
    """Return the GPU's name from nvidia-smi: this process stays off the GPU."""
    return _first_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "cuda"


def _first_line(*command: str) -> str:
    """Return the first line of a command's output, "" if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().split("\n")[0]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", info.read_text(encoding="utf-8") if info.exists() else "", re.MULTILINE)
    return names[0] if names else platform.machine()


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def memory_folder(arguments: argparse.Namespace) -> Path | None:
    """Return the folder for temporary files: /dev/shm if it has room, else None for the system's."""
    memory = Path("/dev/shm")
    if arguments.device == "cpu":
        return None
    return memory if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > STORE_BYTES else None


def announce(part: Part, seconds: float) -> None:
    print(f"{time.strftime('%H:%M:%S')} {part.name}, {seconds:.0f} s: {part.what}", file=sys.stderr, flush=True)


class ChildProcess:
    """A process of a part (`gpu/steps.py`). messages: file for its output."""

    def __init__(self, command: list[str], messages: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with open(messages, "ab") as file:
            self._child = subprocess.Popen(
                command, env=environment, start_new_session=True, stdout=file, stderr=subprocess.STDOUT
            )

    def poll(self) -> int | None:
        return self._child.poll()

    def stop(self, stack: bool) -> None:
        if stack:
            self._child.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
        try:
            os.killpg(self._child.pid, signal.SIGKILL)  # with its children
            self._child.wait(1.0)
        except (ProcessLookupError, subprocess.TimeoutExpired):  # one that a driver holds is left behind
            pass


def spawner(arguments: argparse.Namespace, log: Log, folder: Path, messages: Path) -> Spawn:
    """Return a function that starts a process of a part."""

    def spawn(part: Part, number: int, seconds: float) -> ChildProcess:
        command = [sys.executable, "-m", "gpu.steps", "--step", part.name, "--process", f"{number}/{part.processes}"]
        command += ["--device", arguments.device, "--log", str(log.path), "--folder", str(folder)]
        command += ["--seconds", f"{seconds:.1f}", *["--tiny"] * arguments.tiny]
        return ChildProcess(command, messages)

    return spawn


def beside(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


def write(log: Log, on: str, stem: Path, tiny: bool, earlier: dict[str, Any]) -> dict[str, Any]:
    result = assemble(log.lines(), on, tiny, earlier)
    beside(stem, ".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    try:
        beside(stem, ".md").write_text(markdown(result), encoding="utf-8")
    except Exception:  # rows are safe in the JSON
        traceback.print_exc()
    return result


def summary(result: dict[str, Any], stem: Path) -> int:
    print(beside(stem, ".md").read_text(encoding="utf-8"))
    count = sum(row["cases"] for row in result["checks"]) + len(result["commands"])
    wrong = sum(len(row["wrong"]) for row in result["checks"]) + sum(map(is_wrong, result["commands"]))
    faults, skipped = len(result["faults"]), len(result["skipped"])
    print(
        f"{count - wrong} of {count} checks hold, {faults} cases failed, {skipped} left out: {stem}.md", file=sys.stderr
    )
    return 1 if wrong or faults else 0


if __name__ == "__main__":
    sys.exit(main())
