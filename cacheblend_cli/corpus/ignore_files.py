""".gitignore, .ignore and .git/info/exclude: what ripgrep passes over too.

A rule counts from the folder of its file on. .ignore is stronger than .gitignore, the nearer file than the one above it,
the later line than the earlier. Unlike ripgrep, .gitignore counts outside of a repository too.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

_NAMES = (".ignore", ".gitignore")


@dataclass(frozen=True)
class IgnoreRules:
    """The rules of a folder and those above it, by the names of their files; the nearest first."""

    chains: tuple[tuple[tuple[str, GitIgnoreSpec], ...], ...] = ((),) * (len(_NAMES) + 1)

    @classmethod
    def above(cls, folder: Path) -> IgnoreRules:
        """Those that the folders above have for this one, up to its repository's; none where they leave it out itself, as it
        was named."""
        parents: list[Path] = []
        here = folder.resolve()
        while not os.path.exists(here / ".git"):  # Path.exists raises in a folder without permission
            if here == here.parent:
                return cls()
            here = here.parent
            parents.append(here)
        rules = cls()
        for parent in reversed(parents):
            rules = rules.within(parent)
        return cls() if rules.ignore(f"{folder.resolve()}/") else rules

    def within(self, folder: Path) -> IgnoreRules:
        """With those of a folder below."""
        base = f"{folder}/"
        found = [_read(folder / name) for name in _NAMES]
        found.append(_read(folder / ".git" / "info" / "exclude"))
        if not any(found):
            return self
        own = (((base, spec),) if spec else () for spec in found)
        return IgnoreRules(tuple(new + old for new, old in zip(own, self.chains, strict=True)))

    def ignore(self, path: str) -> bool:
        """path: real and absolute, with a slash at the end of a folder's."""
        for chain in self.chains:
            for base, spec in chain:
                verdict = spec.check_file(path.removeprefix(base)).include
                if verdict is not None:
                    return bool(verdict)
        return False


def _read(file: Path) -> GitIgnoreSpec | None:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    kept = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of brackets in brackets
        for line in lines:
            try:
                GitIgnoreSpec.from_lines([line])
            except ValueError:  # git passes over what is no pattern
                continue
            kept.append(line)
        return GitIgnoreSpec.from_lines(kept)
