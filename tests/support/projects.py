"""Folders of documents, and what a store of an earlier version has of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cacheblend_store import ChunkStore

Cli = Callable[..., Any]
MARA = "# Billing\n\nThe lead of billing is Mara.\n"
JONAS = "# Billing\n\nThe lead of billing is Jonas.\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def listed(cli: Cli, *arguments: str) -> set[str]:
    return {r["source"] for r in cli("chunks", "ls", "--json", *arguments).records}


def as_an_earlier_version_wrote_it(store: Path, folder: Path) -> None:
    """Sources as they were typed in that directory, beside a digest of it."""
    digest = hashlib.blake2b(os.fsencode(folder), digest_size=16).hexdigest()
    with ChunkStore.open(store, mode="write") as opened:
        records = opened.documents()
        typed = [
            replace(r, source=os.path.relpath(r.source, folder), settings={**r.settings, "directory": digest})
            for r in records
        ]
        opened.put_documents(typed, records)
        for manifest in list(opened.chunks()):
            with opened.read() as reader:
                blobs = [bytes(reader.blob(manifest, layer)) for layer in range(manifest.num_layers)]
            opened.remove_chunks([manifest.key])
            opened.put_chunk(replace(manifest, source=os.path.relpath(manifest.source, folder)), blobs)
