""".gitignore, .ignore and .git/info/exclude, with ripgrep's precedence.

A rule applies below the folder of its file. .ignore overrides .gitignore, a nearer file overrides one further up, and a
later line overrides an earlier one. Unlike in ripgrep, .gitignore also applies outside of a repository.
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
    """Rules of a folder and its parents, by file name, nearest first."""

    chains: tuple[tuple[tuple[str, GitIgnoreSpec], ...], ...] = ((),) * (len(_NAMES) + 1)

    @classmethod
    def above(cls, folder: Path) -> IgnoreRules:
        """Return the rules of the parent folders, up to the repository.

        Return no rules if they would ignore the folder itself, because the user named it.
        """
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
        """Return these rules plus the rules of a subfolder."""
        base = f"{folder}/"
        found = [_read(folder / name) for name in _NAMES]
        found.append(_read(folder / ".git" / "info" / "exclude"))
        if not any(found):
            return self
        own = (((base, spec),) if spec else () for spec in found)
        return IgnoreRules(tuple(new + old for new, old in zip(own, self.chains, strict=True)))

    def ignore(self, path: str) -> bool:
        """Return whether to ignore a real absolute path, with a trailing slash for a folder."""
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
        warnings.simplefilter("ignore", FutureWarning)  # nested brackets
        for line in lines:
            try:
                GitIgnoreSpec.from_lines([line])
            except ValueError:  # git skips invalid patterns
                continue
            kept.append(line)
        return GitIgnoreSpec.from_lines(kept)
