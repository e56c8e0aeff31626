"""Write requirements.txt and requirements-cuda.txt, the development environment with hashes: `make lock` runs this.

Versions stay as they are unless pyproject.toml requires others. Arguments go to `uv pip compile`: --upgrade, or
--upgrade-package torch==2.14.1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
UV = ("uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11", "--generate-hashes", "--extra=dev")
BARE = ("--no-header", "--no-annotate", "--no-emit-index-url")
BUILD = "cython; platform_machine != 'x86_64'\nsetuptools-scm; platform_machine != 'x86_64'\n"  # to build wordllama
# Of PyPI's torch. Triton is in both lists: the kernels' tests need it with the CPU build too, but on x86-64 only.
CUDA = ("torch", "triton", "nvidia-", "cuda-")
ENVIRONMENTS = [
    {
        "sys_platform": system,
        "platform_system": name,
        "platform_machine": machine,
        "python_version": version,
        "python_full_version": f"{version}.0",
    }
    for system, name, machine in (
        ("linux", "Linux", "x86_64"),
        ("linux", "Linux", "aarch64"),
        ("darwin", "Darwin", "arm64"),
    )
    for version in ("3.11", "3.12", "3.13")
]
HEADERS = {
    "requirements.txt": """\
# Every package of the development environment but torch, for Python 3.11 to 3.13 on Linux and macOS: `make lock` writes
# this file from pyproject.toml. pip install --require-hashes --no-deps -r requirements.txt
""",
    "requirements-cuda.txt": """\
# PyPI's torch and the CUDA libraries it requires, for a GPU: `make lock` writes this file. The CPU build of the same
# version comes from PyTorch's own index and has other hashes.
""",
}


def direct_requirements() -> dict[str, Requirement]:
    """Return the requirements of pyproject.toml, extras included, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return {requirement.name: requirement for group in groups for requirement in map(Requirement, group)}


def compile_requirements(arguments: list[str]) -> str:
    """Return uv's list for all platforms, with the versions of the present files where they still fit."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "requirements.txt"
        out.write_text("".join((ROOT / name).read_text(encoding="utf-8") for name in HEADERS), encoding="utf-8")
        command = [*UV, *BARE, *arguments, "-o", str(out), "pyproject.toml", "-"]
        subprocess.run(command, cwd=ROOT, input=BUILD, text=True, check=True)
        return out.read_text(encoding="utf-8")


def main() -> None:
    direct = direct_requirements()
    lists = {name: [header] for name, header in HEADERS.items()}
    for block in compile_requirements(sys.argv[1:]).replace("\n    ", "\0").splitlines():
        first, *hashes = block.split("\0")
        requirement = Requirement(first.removesuffix("\\"))
        name, marker = requirement.name, requirement.marker
        if marker is not None and not any(marker.evaluate(environment) for environment in ENVIRONMENTS):
            continue
        lines = "\n".join(("", *(f"    {digest}" for digest in hashes), ""))
        if name.startswith(CUDA):
            lists["requirements-cuda.txt"].append(locked(requirement, marker) + lines)
        if not name.startswith(CUDA) or name == "triton":
            own = direct[name].marker if name in direct else None
            lists["requirements.txt"].append(locked(requirement, own or marker) + lines)
    for name, parts in lists.items():
        (ROOT / name).write_text("".join(parts), encoding="utf-8")


def locked(requirement: Requirement, marker: Marker | None) -> str:
    return f"{requirement.name}{requirement.specifier}{f' ; {marker}' if marker else ''} \\"


if __name__ == "__main__":
    main()
