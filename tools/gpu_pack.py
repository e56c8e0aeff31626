"""Pack what a run of `benchmarks/gpu_check.py` on a machine without a network needs beside the tree, and print the
commands to run there.

    python tools/gpu_pack.py [--python PYTHON] [--out .gpu]

The folder gets wheels of packages that the machine lacks, the Triton kernels of the checks and the models compiled for
its GPU, and a manifest with versions and digests. Kernels are found there only if they were compiled by the same
version of Triton and of Python: --python names a Python 3.12 with the versions in PACKAGES. Without it an environment
is made in build/gpu (gigabytes), or, with --no-kernels, kernels are compiled on the machine, which costs minutes there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu.kernel_cache import write_archive  # noqa: E402
from gpu.plan import CALLS, PREPARATION_S, minutes_of  # noqa: E402

PYTHON_VERSION = "3.12"
PACKAGES = {"triton": "3.6.0", "torch": "2.11.0", "transformers": "5.17.0"}  # of the machine
WHEELS = ("lmdb", "msgspec", "platformdirs", "typer", "gguf", "tomlkit")  # it lacks, or has another version
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
CACHE, MANIFEST = "triton.tar.xz", "manifest.json"
MOST_BYTES = 20 << 20
ARCH = 90
SPARE_S = 30.0  # of a command's limit, for installing the pack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--python", type=Path, help="Python 3.12 with the machine's versions of torch and Triton")
    parser.add_argument("--no-kernels", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    pack: Path = arguments.out
    for old in ("wheels", CACHE, MANIFEST):
        remove(pack / old)
    (pack / "wheels").mkdir(parents=True)
    download_wheels(pack / "wheels")
    if not arguments.no_kernels:
        python = arguments.python or make_environment(ROOT / "build" / "gpu")
        check_versions(python)
        compile_kernels(python, ROOT / "build" / "gpu-kernels", pack / CACHE, arguments.jobs)
    (pack / MANIFEST).write_text(json.dumps(manifest(pack), indent=1) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in pack.rglob("*") if path.is_file())
    print(f"{pack}: {size / 2**20:.1f} MiB")
    print(commands(pack))
    return 0 if size <= MOST_BYTES else 1


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def download_wheels(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
    ]
    command += ["--python-version", PYTHON_VERSION, "--implementation", "cp", "--dest", str(folder)]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("".join(pins()))
        file.flush()
        subprocess.run([*command, "--requirement", file.name], check=True)


def pins() -> list[str]:
    """Return the versions and hashes of the wheels, as requirements.txt has them."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    return re.findall(rf"^(?:{'|'.join(WHEELS)})==(?:.*\\\n)*.*\n", text, re.MULTILINE)


def make_environment(folder: Path) -> Path:
    """Return the Python of an environment with PACKAGES, made now if needed."""
    python, name = folder / "bin" / "python", f"python{PYTHON_VERSION}"
    if not python.exists():
        if shutil.which(name) is None:
            raise SystemExit(
                f"error: no {name}: install it, name one with --python, or leave kernels out: --no-kernels"
            )
        print(f"making {folder}: {', '.join(map('=='.join, PACKAGES.items()))}", file=sys.stderr)
        subprocess.run([name, "-m", "venv", str(folder)], check=True)
    packages = [*map("==".join, PACKAGES.items()), "lmdb", "msgspec", "platformdirs", "xxhash", "rich"]
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def check_versions(python: Path) -> None:
    code = "import json, platform; from importlib.metadata import version; "
    code += f"print(json.dumps([platform.python_version(), *map(version, {list(PACKAGES)})]))"
    found = json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
    if found[0].rpartition(".")[0] != PYTHON_VERSION or found[1:] != list(PACKAGES.values()):
        wanted = ", ".join(f"{name} {version}" for name, version in PACKAGES.items())
        raise SystemExit(f"error: {python} has {', '.join(found)}; it needs Python {PYTHON_VERSION} with {wanted}")


def compile_kernels(python: Path, cache: Path, target: Path, jobs: int) -> None:
    """Compile into `cache`, which later runs use again, and pack what this version of the kernels uses."""
    paths = [ROOT / part for part in ("benchmarks", "tests/support", "kernels", "store", "documents", "")]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_STORE_BINARY_ONLY": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    with tempfile.TemporaryDirectory() as folder:
        used = [Path(folder) / str(number) for number in range(jobs)]
        command = [str(python), str(ROOT / "tools" / "gpu_kernels.py"), "--arch", str(ARCH)]
        running = [
            subprocess.Popen([*command, "--part", f"{number}/{jobs}", "--used", str(file)], env=environment)
            for number, file in enumerate(used)
        ]
        codes = [process.wait() for process in running]
        if any(codes):
            print("warning: some kernels were not compiled; the machine compiles them", file=sys.stderr)
        names = {name for file in used if file.exists() for name in file.read_text(encoding="utf-8").split()}
    write_archive(target, cache, names)


def manifest(pack: Path) -> dict[str, object]:
    files = sorted(path for path in pack.rglob("*") if path.is_file() and path.name != MANIFEST)
    digests = {
        str(path.relative_to(pack)): hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in files
    }
    return {
        "versions": PACKAGES,
        "python": PYTHON_VERSION,
        "arch": ARCH,
        "files": digests,
    }


def commands(pack: Path) -> str:
    """Return what to do on the machine."""
    name = os.path.relpath(pack, ROOT)
    check = f"PYTHONUNBUFFERED=1 python3 benchmarks/gpu_check.py --pack {name}"
    lines = [f"\nKeep {name} out of git, and take it along:  echo /{name}/ >> .git/info/exclude"]
    for call in CALLS:
        minutes, options = minutes_of(call), " --resume --again" * (call > 1)
        limit = round(60 * minutes + SPARE_S)
        lines.append(f"\nCall {call}, at most {limit} s (after {PREPARATION_S:.0f} s of start and transfer):")
        lines.append(f"  {check}{options} --minutes {minutes:g}")
    lines.append(
        "\nResults are written to $OUT, or to benchmarks/results/ where it is not set. Between the calls, copy"
    )
    lines.append("gpu-*.jsonl into benchmarks/results/, so that the second one continues from it.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
