"""Ask before deleting many documents, and say how to free their space."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from typer import Exit, Option

from cacheblend_cli.cli.inputs import yes_or_no
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import counted, format_seconds, format_size
from cacheblend_cli.errors import UsageError

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore, DocumentRecord

YES = Option(False, "--yes", "-y", help="Delete more than one document without asking.")
_PAUSE_S = 60.0  # a longer time between two chunks is not spent on computing
_LEAST_BYTES = 1 << 20  # less free space in the file is not worth a note


def confirm(
    output: Output, store: ChunkStore, keys: Iterable[bytes], documents: Sequence[DocumentRecord] = (), *, yes: bool
) -> None:
    """Ask before chunks of more than one document are deleted. documents: to delete, too.

    Raises UsageError if stdin is not a terminal; Exit for a no.
    """
    if yes:
        return
    with store.read() as reader:
        keys = dict.fromkeys([*keys, *(chunk.key for d in documents for chunk in d.chunks)])
        found = documents or filter(None, (reader.document(d) for key in keys for d in reader.documents_of(key)))
        num_documents = len({record.source for record in found})
        stored = [m for m in map(reader.undamaged, keys) if m is not None and m.has_kv]
    if num_documents < 2:
        return
    times = sorted(m.created for m in stored)
    seconds = sum(later - earlier for earlier, later in pairwise(times) if later - earlier <= _PAUSE_S)
    amounts = [counted(num_documents, "document")]
    amounts += [f"{format_size(sum(m.num_bytes for m in stored))} of KV"] if stored else []
    amounts += [f"about {format_seconds(seconds)} of computing"] if seconds else []
    what = ", ".join(amounts)
    unasked = f"nothing was deleted: {what} would be deleted, and there is no terminal for a confirmation"
    if not yes_or_no(f"delete {what}?", output, UsageError(unasked, "add --yes")):
        output.note("nothing was deleted")
        raise Exit()


def free_bytes(store: ChunkStore) -> int:
    """Return the bytes that compacting the store's file would free."""
    with store.read() as reader:
        return reader.pages.free_bytes


def note_free(output: Output, num_bytes: int) -> None:
    if num_bytes >= _LEAST_BYTES:
        output.note(
            f"the file keeps its size; cacheblend chunks compact gives {format_size(num_bytes)} back to the disk"
        )
