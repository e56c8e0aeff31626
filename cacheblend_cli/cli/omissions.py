"""Messages about parts left out of documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import counted

if TYPE_CHECKING:
    from cacheblend_cli.collect.events import Incomplete

_NAMED = 3  # omissions to name without --verbose


def report_omissions(documents: Sequence[Incomplete], output: Output, *, verbose: bool = False) -> None:
    """Write one line about the documents whose omissions the store does not have yet.

    verbose: write a line per document instead, then their number, including those that the store has.
    """
    if verbose:
        for document in documents:
            output.note(f"{document.source}: left out: {'; '.join(document.omissions)}")
        if documents:
            output.warn(f"parts of {counted(len(documents), 'document')} are left out")
        return
    new = [document for document in documents if document.is_news]
    if not new:
        return
    first = new[0]
    named = "; ".join(first.omissions[:_NAMED])
    if len(new) > 1:
        count = f"{len(new):,} documents"
        output.warn(f"parts of {count} are left out, for example of {first.source}: {named}; -v lists them")
    else:
        rest = len(first.omissions) - _NAMED
        output.warn(f"{first.source}: left out: {named}" + (f"; {rest} more, -v lists them" if rest > 0 else ""))
