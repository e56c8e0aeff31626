"""Flags that several commands share, each declared once, and the settings they resolve to."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from cacheblend_cli.cli import completion
from cacheblend_cli.cli.help import PANELS
from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.settings import Resolved, Settings, grouped, of_settings, resolve

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import Engine
    from cacheblend_cli.cli.output import Output
    from cacheblend_cli.corpus.scopes import Scope

T = TypeVar("T")

Source = Annotated[
    str | None,
    typer.Option(
        help="Only documents at, below or like this: docs, 'docs/*.md', /*NAME*.",
        metavar="GLOB",
        autocompletion=completion.sources,
    ),
]
Everywhere = Annotated[
    bool, typer.Option("--all", help="Search all documents, not only those below the current project.")
]
Local = Annotated[bool, typer.Option("--local", help="Ask no engine that runs (cacheblend serve): do it here.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Ids only, no messages.")]
NoMessages = Annotated[bool, typer.Option("--quiet", "-q", help="No messages.")]


EVERYDAY = ("top_k", "search", "ratio", "max_tokens", "system", "model", "store")
"""Settings whose flags stand first in a command's help, in no panel."""
_PANEL = {
    name: panel
    for panel, groups in zip(
        PANELS,
        (("search",), ("sampling",), ("prompt",), ("model", "machine", "memory", "tenant", "store"), ("blend",)),
        strict=True,
    )
    for name in grouped(*groups, but=EVERYDAY)
}


def asking(*, but: Sequence[str] = ()) -> tuple[str, ...]:
    """The settings of a command that answers questions."""
    groups = ("search", "blend", "sampling", "prompt", "model", "machine", "memory", "tenant")
    return (*grouped(*groups, but=("block_size", *but)), "store", "lock_timeout")


def with_settings(*names: str, **help_of: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a command the flags of these settings. Where its signature has `settings` (Settings) or `resolved` (Resolved), it
    gets what the flags, the environment, the files and the defaults make of them.

    help_of: settings whose help is another one in this command.
    """
    flags = {name: _flag(name, help_of.get(name)) for name in dict.fromkeys((*names, *help_of))}

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        hints, keyword = get_type_hints(command, include_extras=True), inspect.Parameter.KEYWORD_ONLY
        every = inspect.signature(command).parameters.values()
        own = [p.replace(kind=keyword, annotation=hints[p.name]) for p in every if p.name not in _RESULTS]
        given = [inspect.Parameter(name, keyword, default=None, annotation=hint) for name, hint in flags.items()]
        [result] = [p.name for p in every if p.name in _RESULTS]

        @wraps(command)
        def run(**values: Any) -> T:
            resolved = resolve({name: values.pop(name) for name in flags})
            return command(**values, **{result: _RESULTS[result](resolved)})

        # the parser reads these; what is the same for many commands stands last in their help
        parameters = sorted((*own, *given), key=lambda p: p.name in ("json", "quiet"))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


_RESULTS: dict[str, Callable[[Resolved], Any]] = {"settings": lambda r: r.settings, "resolved": lambda r: r}
_FIELDS = {f.name: f for f in fields(Settings)}
_KINDS = get_type_hints(Settings)


def _flag(name: str, help_text: str | None) -> Any:
    """The annotation of a setting's flag: a flag that is not given is None."""
    told, kind = _FIELDS[name].metadata, _KINDS[name]
    words = kind == float | str  # a number or a word
    if get_origin(kind) is tuple:
        kind = list[str]
    shown, default = told["shown"], _FIELDS[name].default
    if shown is True:  # nothing where it is empty or off
        empty = default in ("", None, ()) or default is False
        shown = False if empty else f"{default:g}" if isinstance(default, float) else str(default)
    return Annotated[
        (str if words else kind) | None,
        typer.Option(
            *(told["flag"].split() or (f"--{name.replace('_', '-')}",)),
            help=help_text or told["help"],
            show_default=shown,
            metavar="X|auto" if words else None,
            rich_help_panel=_PANEL.get(name),
            autocompletion=completion.models if name == "model" else None,
        ),
    ]


def scope_of(store: ChunkStore, source: str | None, everywhere: bool, output: Output, collection: str = "") -> Scope:
    """Which documents a search takes: what --source and --all say, else the collection's, else the current project's, which
    it says.

    Raises NotFoundError when --source matches nothing that is stored, and for a collection that nothing is of.
    """
    from cacheblend_cli.corpus.scopes import EVERYTHING, Scope, collection_scope, scope_here
    from cacheblend_cli.corpus.search import searchable

    names = searchable(store)
    if source is not None:
        scope = Scope.matching(source)
        if not any(map(scope.holds, names)):
            raise NotFoundError(f"no stored document is at, below or like {source}", "list them: cacheblend chunks ls")
        return scope
    if everywhere or not (names or collection):
        return EVERYTHING
    if collection:
        return collection_scope(store, collection)
    scope, told = scope_here(store, names)
    output.note(told)
    return scope


def import_engine() -> None:
    """Import torch and what stands on it, before a command asks for parts of it. Nothing that an import makes is garbage,
    and looking for some takes a fifth of its time; what is made then stays, and is never looked through again."""
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import cacheblend_cli.api  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def load_engine(settings: Settings, output: Output) -> Engine:
    """The engine the settings name."""
    import_engine()
    from cacheblend_cli.api import Engine, EngineConfig
    from cacheblend_cli.prompt.wording import read_prompt

    prompt = read_prompt(settings.prompt) if settings.prompt else ""
    config = of_settings(
        EngineConfig, settings, model=settings.model or None, lora=settings.lora or None, prompt=prompt
    )
    return Engine.load(config, output.note if output.err_tty else None, output.note)


def about_demo(settings: Settings, output: Output, sources: Iterable[str]) -> None:
    """Where no model was named, there is only the handbook's, and not all of these files are the handbook's: say what it can
    be used for, and how to get another."""
    from cacheblend_cli.corpus.places import is_below, place_of
    from cacheblend_cli.demo import handbook_dir
    from cacheblend_cli.model.named import HANDBOOK, INSTALL, default_model

    if settings.model or (name := default_model()) != HANDBOOK:
        return
    places, handbook = [place_of(source) for source in sources], place_of(str(handbook_dir()))
    if not (places and all(p == handbook or is_below(p, handbook) for p in places)):
        output.note(f"no --model given: {name} answers, which knows the demo handbook's kind of text only")
        output.note(f"a small real model, which is then taken: {INSTALL}")


def open_store(
    settings: Settings, *, write: bool, create: bool | None = None, max_bytes: int | None = None
) -> ChunkStore:
    """The store the settings name. Writing creates it, unless `create` is False; else it must be there.

    max_bytes: a new quota for it.
    """
    from cacheblend_store import ChunkStore

    return ChunkStore.open(
        settings.store_path,
        mode="write" if write else "read",
        create=create,
        max_bytes=max_bytes,
        lock_timeout=settings.lock_timeout,
        force=settings.force_store,
    )


def store_in_use(settings: Settings, *, write: bool = True) -> ChunkStore:
    """A store that is there: for writing, so that uses are noted and computed chunks stored; for reading where this user may not."""
    from cacheblend_store import StorePermission

    if write:
        try:
            return open_store(settings, write=True, create=False)
        except StorePermission:
            pass
    return open_store(settings, write=False)
