"""cacheblend search: stored chunks by their words and by what they mean."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.settings import Settings, grouped


@options.with_settings(*grouped("search", but=["order"]), "store", top_k="How many chunks.")
def search(
    settings: Settings,
    query: Annotated[str, typer.Argument(help="Words to look for.")],
    source: options.Source = None,
    everywhere: options.Everywhere = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Find stored chunks by their words and their documents' titles, or by what they mean, by default below the current project: the nearest
    directory from here up that holds a cacheblend.toml or a .git.

    With -q only ids: cacheblend search "billing lead" -q | cacheblend ask --chunks - "Who leads billing?"
    """
    from cacheblend_cli.corpus.places import shown
    from cacheblend_cli.corpus.search import check_context, found_elsewhere, how_of
    from cacheblend_cli.corpus.search import search as find

    output = Output(quiet=quiet)
    if not query.strip():
        raise UsageError("the query is empty", 'for example: cacheblend search "billing lead"')
    check_context(settings.context)
    with options.open_store(settings, write=False) as kv_store:
        scope = options.scope_of(kv_store, source, everywhere, output, settings.collection)
        how = how_of(settings, output.note)
        hits = find(kv_store, query, settings.top_k, context=settings.context, scope=scope, how=how)
        if not hits and find(kv_store, query, 1):
            raise found_elsewhere()
    for hit in hits:
        if json:
            output.json(
                {
                    "id": hit.id,
                    "source": shown(hit.source),
                    "index": hit.index,
                    "score": round(hit.score, 4),
                    "snippet": hit.snippet,
                    "beside": hit.beside,
                }
            )
        elif quiet:
            output.text(hit.id)
    if not hits:
        raise NotFoundError(f"no stored chunk matches {query!r}", "try other words, or precompute more documents")
    if not json and not quiet:
        rows = [
            (
                h.id[:12],
                "" if h.beside else f"{h.score:.{4 if how.by == 'both' else 2}f}",
                f"{shown(h.source)}#{h.index}",
                h.snippet[:90],
            )
            for h in hits
        ]
        output.table(("id", "score", "source", "snippet"), rows, right=(1,), ends=(2,))
