"""Public names of documents, without private paths, and short paths that tell files of the same name apart."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from cacheblend_cli.corpus.places import PUT, SENT, is_file, is_stdin, with_parents


def public_id(name: str) -> str:
    """Return the public id of a document: its id, or for a file a digest of its private path."""
    if name.startswith((PUT, SENT)):
        return name.split("/", 2)[2]
    return "file-" + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def public_title(name: str) -> str:
    """Return the id, or the file name without its directories."""
    return public_id(name) if name.startswith((PUT, SENT)) else PurePosixPath(name).name


def distinct_paths(names: Iterable[str], roots: Collection[str]) -> dict[str, str]:
    """Return a path for each file that shares its file name, starting at the precomputed folder's own name.

    names: document names, see corpus/places.py. roots: paths that were given to precompute.
    """
    files = [name for name in names if is_file(name) and not is_stdin(name)]
    counts = Counter(map(public_title, files))
    return {name: "/".join(_public_parts(name, roots)) for name in files if counts[public_title(name)] > 1}


def _public_parts(name: str, roots: Collection[str]) -> list[str]:
    """Return the parts of a path, starting at the outermost root above it, or at the folder of a file given itself."""
    above = [path for path in with_parents(name) if path in roots]
    if not above:
        return [name.rpartition("/")[2]]
    root = above[-1] if above[-1] != name else name.rpartition("/")[0]
    return name.removeprefix(f"{root.rpartition('/')[0]}/").split("/")
