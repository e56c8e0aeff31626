"""cacheblend search: find stored chunks by words and by meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer import Argument

from cacheblend_cli.cli import options
from cacheblend_cli.cli.engines import search_warm
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import open_store
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import Settings, grouped
from cacheblend_cli.text_files import check_text
from cacheblend_cli.types import SearchParams

if TYPE_CHECKING:
    from cacheblend_cli.corpus.search import SearchResult


@options.with_settings(*grouped("search", but=["on_weak_match", "on_unsupported"]), "store", top_k="Number of chunks.")
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
    from cacheblend_cli.corpus.search import damaged_note, left_out_notes, look, more_note, weak_note

    output = Output(json=json, quiet=quiet)
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
    _show(found, output)
    damaged = damaged_note(found.num_damaged) if found.num_damaged else ""
    more = more_note(found.num_more, params.k) if found.num_more else ""
    for note in filter(None, (*left_out_notes(found.num_cut, found.num_repeated), more, damaged, weak, by)):
        output.note(note)


def _show(found: SearchResult, output: Output) -> None:
    rows, digits = [], 4 if found.by == "both" else 2
    for hit in found.hits:
        source = shown(hit.source)
        record = {"id": hit.id, "source": source, "index": hit.index, "score": round(hit.score, 4)}
        record |= {"snippet": hit.snippet, "beside": hit.beside, "match": round(hit.match, 4)}
        output.json({**record, "also_in": list(map(shown, hit.others))})
        output.ids([hit.id])
        score = "" if hit.beside else f"{hit.score:.{digits}f}"
        rows.append((hit.id[:12], score, f"{source}#{hit.index}", hit.snippet[:90]))
    if not (output.is_json or output.quiet):
        output.table(("id", "score", "source", "snippet"), rows, right=(1,), ends=(2,))
        for hit in found.hits:
            if hit.others:
                output.note(f"{shown(hit.source)}#{hit.index} is also in {', '.join(map(shown, hit.others))}")
