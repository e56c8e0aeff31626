"""Messages about what is left out of documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import counted

if TYPE_CHECKING:
    from cacheblend_cli.collect.precompute import Incomplete

_NAMED = 3  # omissions to name without --verbose


def report_omissions(documents: Sequence[Incomplete], output: Output, *, verbose: bool = False) -> None:
    """Write one line about the documents whose omissions the store does not have yet.

    verbose: also write a line per document, including those that the store has.
    """
    if verbose:
        for document in documents:
            output.note(f"{document.source}: left out: {'; '.join(document.omissions)}")
    counted_ones = documents if verbose else [document for document in documents if document.is_news]
    if not counted_ones:
        return
    if verbose:
        output.warn(f"parts of {counted(len(counted_ones), 'document')} are left out")
        return
    first, num = counted_ones[0], len(counted_ones)
    named = "; ".join(first.omissions[:_NAMED])
    if num > 1:
        output.warn(f"parts of {num:,} documents are left out, for example of {first.source}: {named}; -v lists them")
    else:
        rest = len(first.omissions) - _NAMED
        output.warn(f"{first.source}: left out: {named}" + (f"; {rest} more, -v lists them" if rest > 0 else ""))
