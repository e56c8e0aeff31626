"""Locked packages: they cover pyproject.toml, every one has its hashes, and no install mixes two indexes."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def locked(name: str) -> dict[str, Requirement]:
    """Return the requirements of a locked file by name, after checking that each is one version with hashes."""
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    found: dict[str, Requirement] = {}
    for line in lines:
        first, *hashes = line.split(" --hash=")
        requirement = Requirement(first)
        assert hashes, f"{requirement.name} has no hash"
        assert all(HASH.fullmatch(f"--hash={digest.strip()}") for digest in hashes), line
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), f"{requirement} is not one version"
        assert canonicalize_name(requirement.name) not in found, f"{requirement.name} is there twice"
        found[canonicalize_name(requirement.name)] = requirement
    return found


def required() -> list[Requirement]:
    """Return the requirements of the project with the extra dev and the extras that it includes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found, extras, seen = list(map(Requirement, project["dependencies"])), ["dev"], set()
    while extras:
        seen.add(extra := extras.pop())
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            if requirement.name == project["name"]:
                extras += requirement.extras - seen
            else:
                found.append(requirement)
    return found


def test_the_lock_covers_every_requirement() -> None:
    packages, cuda = locked("requirements.txt"), locked("requirements-cuda.txt")
    assert all(packages[name].specifier == cuda[name].specifier for name in packages.keys() & cuda.keys())
    assert "torch" in cuda  # its CPU build has other hashes
    for requirement in required():
        pinned = (cuda | packages).get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{requirement.name} is not locked: run make lock"
        [version] = pinned.specifier
        assert requirement.specifier.contains(version.version), f"{pinned} is not {requirement}: run make lock"
        if requirement.marker is not None:
            assert str(pinned.marker) == str(requirement.marker)


def test_cuda_libraries_are_not_in_the_list_of_every_environment() -> None:
    assert not [name for name in locked("requirements.txt") if name.startswith(("nvidia-", "cuda-", "torch"))]


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-cuda.txt", "smollm2.txt"])
def test_a_lock_names_no_index(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert locked(name)
    assert "://" not in text
    assert not re.search(r"^\s*-", re.sub(r"^    --hash=.*$", "", text, flags=re.MULTILINE), re.MULTILINE)


def test_no_file_installs_from_two_indexes() -> None:
    """With two indexes, either may serve any package under the name of another's."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    option = "--extra-" + "index-url"
    found = subprocess.run(["git", "grep", "-n", "-I", "-F", "-e", option], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1, found.stdout + found.stderr
