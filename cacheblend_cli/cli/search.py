"""cacheblend search: find stored chunks by words and by meaning."""

from __future__ import annotations

from typer import Argument

from cacheblend_cli.cli import options
from cacheblend_cli.cli.engines import search_warm
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import open_store
from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import Settings, grouped
from cacheblend_cli.text_files import check_text
from cacheblend_cli.types import SearchParams


@options.with_settings(*grouped("search", but=["order", "on_weak_match"]), "store", top_k="Number of chunks.")
def search(
    settings: Settings,
    query: str = Argument(help="Search query."),
    source: options.Source = None,
    everywhere: options.Everywhere = False,
    local: options.Local = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Find stored chunks by words of their text, title and path, or by meaning.

    Searches the current project: the nearest folder upwards with a cacheblend.toml or .git.

    With -q, print only ids: cacheblend search "billing lead" -q | cacheblend ask --chunks - "Who leads billing?"
    """
    from cacheblend_cli.corpus.places import shown
    from cacheblend_cli.corpus.search import damaged_note, hits_cut_note, look, weak_note

    output = Output(quiet=quiet)
    if not query.strip():
        raise UsageError("the query is empty", 'for example: cacheblend search "billing lead"')
    check_text(query, "the query")
    with open_store(settings, write=False) as kv_store:
        scope_notes = list[str]()
        scope = options.scope_of(kv_store, source, everywhere, scope_notes.append, settings.collection)
        for note in scope_notes if not scope.path else ():  # the project has no documents
            output.note(note)
        params = SearchParams.of(settings, scope)
        warm = None if local else search_warm(settings, query, params, output.note)
        found, by = warm or (look(kv_store, query, params, output.note), "")
        weak = weak_note(kv_store, scope) if found.weak else ""
    hits, how = found.hits, found.by
    if json:
        for hit in hits:
            record = {"id": hit.id, "source": shown(hit.source), "index": hit.index, "score": round(hit.score, 4)}
            output.json({**record, "snippet": hit.snippet, "beside": hit.beside, "match": round(hit.match, 4)})
    elif quiet:
        for hit in hits:
            output.text(hit.id)
    else:
        digits = 4 if how == "both" else 2
        rows = [
            (h.id[:12], "" if h.beside else f"{h.score:.{digits}f}", f"{shown(h.source)}#{h.index}", h.snippet[:90])
            for h in hits
        ]
        output.table(("id", "score", "source", "snippet"), rows, right=(1,), ends=(2,))
    if found.num_cut:
        output.note(hits_cut_note(found.num_cut))
    if found.num_damaged:
        output.note(damaged_note(found.num_damaged))
    if weak:
        output.note(weak)
    if by:
        output.note(by)
