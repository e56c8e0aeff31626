"""Check and measure everything that needs a GPU within one total budget, most valuable first (gpu/README.md).

    python benchmarks/gpu_check.py [--pack FOLDER] [--minutes M] [--resume [FOLDER] [--again]] [--out FOLDER]
    python benchmarks/gpu_check.py --device cpu --tiny --out /tmp/tiny

The parts, their order and their seconds are in `gpu/plan.py`. Each runs in processes of its own (`gpu/steps.py`); this
process never touches the GPU. If one of them dies, loses the device or writes nothing for 18 seconds, another continues
with the next case. Rows are appended to gpu-DEVICE.jsonl in the output folder ($OUT if that is set, else
benchmarks/results/) as they are measured; gpu-DEVICE.json and .md are rewritten after each part, .log has the
processes' messages.

--pack: a folder of `tools/gpu_pack.py`, with wheels of missing packages and compiled kernels. --resume: continue from
the rows in FOLDER (benchmarks/results/), if they are of this device and these versions. --again: only repeat failed
cases and wrong numbers, and run the parts of the second call.

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
from gpu.log import Log, Where, assemble, is_wrong, read_lines
from gpu.plan import PLAN, Part, minutes_of
from gpu.report import markdown, targets
from gpu.runner import Clock, Runner

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
        where = whereabouts(arguments.device)
        stem = arguments.out / f"gpu-{slug(where.device)}{'-tiny' * arguments.tiny}"
        log = Log(beside(stem, ".jsonl"), str(where))
        arguments.out.mkdir(parents=True, exist_ok=True)
        if not begin(log, where, arguments):
            return 2
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-gpu-", dir=store_dir(arguments)))
        note_environment(log, arguments.minutes)
        runner = Runner(
            log, spawner(arguments, log, Path(folder)), 60 * arguments.minutes, Clock(), again=arguments.again
        )
        runner.run(plan_of(arguments), announce, lambda: write(log, stem, arguments.tiny))
    return summary(write(log, stem, arguments.tiny), stem)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that any CPU takes")
    parser.add_argument("--minutes", type=float, default=minutes_of(1), help=f"for everything ({minutes_of(1):g})")
    parser.add_argument("--pack", type=Path, help="folder of tools/gpu_pack.py to install first, without a network")
    parser.add_argument("--resume", type=Path, nargs="?", const=RESULTS, help="continue from the rows in this folder")
    parser.add_argument(
        "--again", action="store_true", help="with --resume: only what failed, and the second call's parts"
    )
    parser.add_argument("--processes", type=int, help="for the kernel checks (half the cores, 8 at most)")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS), help="folder of the results"
    )
    return parser.parse_args()


def plan_of(arguments: argparse.Namespace) -> list[Part]:
    """Return the parts, with no more processes than half the cores."""
    most = arguments.processes or max(1, (os.cpu_count() or 1) // 2)
    return [replace(part, processes=min(part.processes, most)) for part in PLAN]


def begin(log: Log, where: Where, arguments: argparse.Namespace) -> bool:
    """Prepare the log. Returns False if the rows to continue from are of other versions."""
    earlier = None if arguments.resume is None else arguments.resume / log.path.name
    if earlier is None or not earlier.exists():
        if earlier is not None:
            print(f"no rows of {where.device} in {arguments.resume}: everything is measured", file=sys.stderr)
        log.path.unlink(missing_ok=True)
        return True
    if foreign := {on for on in (line["on"] for line in read_lines(earlier)) if not where.has(on)}:
        print(
            f"error: {earlier} has rows of: {'; '.join(sorted(foreign))}. This is: {where}. Continue without --resume",
            file=sys.stderr,
        )
        return False
    log.resume(earlier, again=arguments.again)
    return True


def unpack(pack: Path, folder: Path) -> None:
    """Install a pack's wheels into a folder in front of sys.path, and its kernels into one that Triton uses, also in
    child processes."""
    manifest = json.loads((pack / "manifest.json").read_text(encoding="utf-8"))
    for name, digest in manifest["files"].items():
        if hashlib.blake2b((pack / name).read_bytes(), digest_size=16).hexdigest() != digest:
            raise SystemExit(f"error: {pack / name} is damaged: pack it again")
    install(pack / "wheels", folder / "site")
    name_this_tree(folder / "site")
    if (kernels := pack / "triton.tar.xz").exists():
        read_archive(kernels, folder / "triton")
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    for name, version in manifest["versions"].items():
        if version_of(name) != version:
            print(f"warning: packed for {name} {version}, here is {version_of(name) or 'none'}", file=sys.stderr)


def name_this_tree(site: Path) -> None:
    """Say in `site` which version the tree is, as its installation does."""
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


def install(wheels: Path, target: Path) -> None:
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        raise SystemExit(f"error: no wheels in {wheels}")
    options = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *found], check=True)
    sys.path.insert(0, str(target))


def missing(device: str) -> list[str]:
    """Return packages that do not import, so that a run fails before it uses its time."""
    found = [name for name in LARGE[: 3 if device.startswith("cuda") else 2] if importlib.util.find_spec(name) is None]
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            found.append(f"{name} ({error})")
    return found


def whereabouts(device: str) -> Where:
    versions = {"python": platform.python_version(), **{name: version_of(name) for name in LARGE}}
    name = cpu_name() if device == "cpu" else gpu_name()
    return Where(
        name, ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items()), code_version()
    )


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
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    return " at ".join(filter(None, (digest.hexdigest(), commit)))


def gpu_name() -> str:
    """Return the GPU's name from nvidia-smi: this process stays off the GPU."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        found = []
    return found[0] if found else "cuda"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", info.read_text(encoding="utf-8") if info.exists() else "", re.MULTILINE)
    return names[0] if names else platform.machine()


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def note_environment(log: Log, minutes: float) -> None:
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    row = {"cpu": cpu_name(), "cores": os.cpu_count(), "memory_gib": memory, "minutes": minutes}
    log.write("run", "environment", "row", part="environment", row=row)


def store_dir(arguments: argparse.Namespace) -> Path | None:
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


def spawner(arguments: argparse.Namespace, log: Log, folder: Path) -> Any:
    """Return a function that starts a process of a part."""

    def spawn(part: Part, number: int, seconds: float) -> ChildProcess:
        command = [sys.executable, "-m", "gpu.steps", "--step", part.name, "--process", f"{number}/{part.processes}"]
        command += ["--device", arguments.device, "--log", str(log.path), "--on", log.on, "--folder", str(folder)]
        command += ["--seconds", f"{seconds:.1f}", *["--tiny"] * arguments.tiny]
        return ChildProcess(command, log.path.with_suffix(".log"))

    return spawn


def beside(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


def write(log: Log, stem: Path, tiny: bool) -> dict[str, Any]:
    result = assemble(log.lines(), tiny)
    try:
        full = {**result, "targets": [] if tiny else targets(result)}
        beside(stem, ".json").write_text(json.dumps(full, indent=1) + "\n", encoding="utf-8")
        beside(stem, ".md").write_text(markdown(result), encoding="utf-8")
    except Exception:  # rows are safe in the log
        traceback.print_exc()
    return result


def summary(result: dict[str, Any], stem: Path) -> int:
    print(beside(stem, ".md").read_text(encoding="utf-8"))
    rows = [*result["checks"], *result["commands"]]
    wrong = sum(map(is_wrong, rows))
    print(
        f"{len(rows) - wrong} of {len(rows)} checks hold, {len(result['faults'])} cases failed, "
        f"{len(result['skipped'])} left out; {stem}.jsonl, .json, .md",
        file=sys.stderr,
    )
    return 1 if wrong or result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
