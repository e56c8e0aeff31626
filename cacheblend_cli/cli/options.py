"""Flags shared by several commands, and the settings they resolve to."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, get_origin, get_type_hints

from typer import Option

from cacheblend_cli import user_cache
from cacheblend_cli.cli import completion
from cacheblend_cli.cli.flags import ASK, PANELS
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.setting_checks import check_settings, with_origin
from cacheblend_cli.cli.stores import OF_THE_STORE, with_model_of_store
from cacheblend_cli.errors import CacheBlendError, ModelNotFound, NotFoundError, UsageError
from cacheblend_cli.model.named import FALLBACK_NOTE, default_model
from cacheblend_cli.settings import GROUPS, Resolved, Settings, grouped, of_settings, resolve
from cacheblend_cli.settings.identity import IDENTITY
from cacheblend_cli.types import EVERYTHING, Scope

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.engine.config import EngineConfig
    from cacheblend_cli.engine.engine import Engine
    from cacheblend_cli.engine.unloaded import UnloadedEngine

T = TypeVar("T")

answer_option = partial(Option, rich_help_panel="The answer")
machine_option = partial(Option, rich_help_panel="This machine and the store")
Source = Annotated[
    str | None,
    Option(
        help="Only these documents: a file, folder or pattern such as 'docs/*.md' or '/*NAME*'.",
        metavar="GLOB",
        autocompletion=completion.sources,
    ),
]
Everywhere = Annotated[
    bool, Option("--all", help="Search all stored documents, not only those of the current project.")
]
Local = Annotated[bool, Option("--local", help="Don't use a running engine (see cacheblend ps).")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Show all sources, the documents searched, tokens and times.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print ids only, and no messages.")]
NoMessages = Annotated[bool, Option("--quiet", "-q", help="Print no messages.")]


COMMON = (
    "top_k", "retrieve", "allow_origin", "collection", "mode", "ratio", "max_tokens", "temperature", "system", "model", "store",
    "chunk_tokens", "context", "max_size",
)  # fmt: skip
"""Settings whose flags --help shows; --help-all shows the others in panels."""
PANEL_OF = {
    name: panel
    for panel, groups in zip(
        PANELS,
        (
            ("search",), ("reading", "cutting"), ("sampling",), ("prompt",), ("model", "machine", "decoding", "memory", "tenant", "store", "tier", "start"),
            ("blend", "research", "check"),
        ),
        strict=True,
    )
    for name in grouped(*groups, but=COMMON)
}  # fmt: skip


def with_settings(*names: str, **help_of: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Add the flags of these settings to a command.

    The command declares a parameter `settings` (Settings) or `resolved` (Resolved), which receives the values of flags,
    environment, files and defaults.

    help_of: setting -> help text that replaces its own.
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
            if "model" in flags:
                resolved = with_model_of_store(resolved)
            if resolved.ignored:
                Output().warn(resolved.ignored_note)
            check_settings(resolved)
            if "tensor_parallel" in flags or flags.keys() >= set(ASK):
                _serve_if_other_rank(resolved.settings.tensor_parallel)
            try:
                return command(**values, **{result: _RESULTS[result](resolved)})
            except (UsageError, ModelNotFound) as error:
                with_origin(error, resolved)
                raise

        # the parser reads these; --json and --quiet come last in the help
        parameters = sorted((*own, *given), key=lambda p: p.name in ("json", "quiet"))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _serve_if_other_rank(tensor_parallel: int) -> None:
    """In a rank of torchrun other than 0, work for rank 0, which runs the command, and exit."""
    if os.environ.get("RANK", "").strip() not in ("", "0"):
        from cacheblend_cli.engine.engine import serve_other_rank

        serve_other_rank(tensor_parallel)


ENGINE = ("store", *IDENTITY)
"""Settings by which a command finds its engine, or starts one: its other settings are those of the configuration."""


def engine_flags(resolved: Resolved) -> list[str]:
    """Return the command-line flags of the settings in ENGINE that were given as flags."""
    found: list[str] = []
    for name, origin in resolved.origin.items():
        if origin == "flag" and name in ENGINE:
            value = getattr(resolved.settings, name)
            values = value if isinstance(value, tuple) else (value,)
            found += [f"--{name.replace('_', '-')}={item}" for item in values]
    return found


_RESULTS: dict[str, Callable[[Resolved], Any]] = {"settings": lambda r: r.settings, "resolved": lambda r: r}
_KINDS = get_type_hints(Settings)


def _flag(name: str, help_text: str | None) -> Any:
    """Return the annotation of a setting's flag. A value of None means that the flag was not given."""
    metadata, kind = completion.SETTINGS[name].metadata, _KINDS[name]
    number_or_word = kind in (float | str, int | str)
    flag = f"--{name.replace('_', '-')}"
    if get_origin(kind) is tuple:
        kind = list[str]
    elif kind is bool:
        flag += f"/--no-{name.replace('_', '-')}"
    shown, default = metadata["shown"], completion.SETTINGS[name].default
    if shown is True:  # show a default unless it is empty or off
        empty = default in ("", None, ()) or default is False
        shown = False if empty else f"{default:g}" if isinstance(default, float) else str(default)
    return Annotated[
        (str if number_or_word else kind) | None,
        Option(
            *(metadata["flag"].split() or (flag,)),
            help=help_text or metadata["help"],
            show_default=shown,
            metavar=("N|WORD" if kind == int | str else "X|WORD") if number_or_word else None,
            rich_help_panel=PANEL_OF.get(name),
            autocompletion=completion.values_of(name),
        ),
    ]


def scope_of(
    store: ChunkStore, source: str | None, everywhere: bool, say: Callable[[str], None], collection: str = ""
) -> Scope:
    """Return the documents to search: --source, --all or the collection, else those of the current project. say:
    callback for a message if documents are left out. Raises NotFoundError if --source matches no stored document or the
    collection is empty."""
    from cacheblend_cli.corpus.scopes import collection_scope, holds, scope_here, scope_of
    from cacheblend_cli.corpus.search_index import searchable

    names = searchable(store)
    if source is not None:
        scope = scope_of(source)
        if not any(holds(scope, name) for name in names):
            raise NotFoundError(f"no stored document matches {source}", "list them: cacheblend chunks ls")
        return scope
    if everywhere or not (names or collection):
        return EVERYTHING
    if collection:
        return collection_scope(store, collection)
    scope, note = scope_here(store, names)
    if note:
        say(note)
    return scope


def import_engine() -> None:
    """Import torch and the engine with the garbage collector off. Collecting garbage takes a fifth of the import time
    and finds none. The imported objects are frozen afterwards."""
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import cacheblend_cli.engine.engine  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def engine_config(settings: Settings) -> EngineConfig:
    """Return the configuration of the engine. Raises NotFoundError and UsageError for what can be checked without
    torch, such as a model that does not exist."""
    from cacheblend_cli.engine.config import EngineConfig
    from cacheblend_cli.model.locate import locate
    from cacheblend_cli.prompt.wording import read_prompt

    prompt = read_prompt(settings.prompt) if settings.prompt else ""
    if settings.lora and not Path(settings.lora).expanduser().is_dir():
        raise NotFoundError(f"no LoRA adapter {settings.lora}", "--lora takes a directory of peft's save_pretrained")
    locate(settings.model or default_model())
    return of_settings(EngineConfig, settings, model=settings.model or None, lora=settings.lora or None, prompt=prompt)


def load_engine(settings: Settings, output: Output) -> Engine:
    """Load the engine that the settings describe. Raises NotFoundError, UsageError, DeviceError."""
    config = engine_config(settings)
    make_room(settings)
    cutting = {name: getattr(settings, name) for name in (*GROUPS["cutting"], "context")}
    output.status(f"loading {settings.model or default_model()}")
    import_engine()
    from cacheblend_cli.engine.engine import Engine

    engine = Engine.load(config, progress=output.status, notice=output.note, **cutting)
    engine.when_lost(partial(_exit_on_lost_rank, output, engine))
    return engine


def make_room(settings: Settings) -> None:
    """End idle engines that commands left running if the model takes more than a quarter of the free memory. On a GPU
    it always does."""
    from cacheblend_cli.model.host_memory import available_memory, total_memory
    from cacheblend_cli.model.locate import locate

    path = locate(settings.model or default_model())
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    if may_use_gpu(settings) or 4 * size > (available_memory() or total_memory() // 2):
        from cacheblend_cli.server.background import end_idle

        end_idle()


def may_use_gpu(settings: Settings) -> bool:
    return settings.device != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))


def engine_for_documents(settings: Settings, output: Output, on_loaded: Callable[[], None]) -> Engine | UnloadedEngine:
    """Return an engine that loads its model when something is computed, or a loaded one if that cannot be described
    before. Raises the errors of `load_engine`."""
    from cacheblend_cli.engine.unloaded import UnloadedEngine

    def load() -> Engine:
        engine = load_engine(settings, output)
        on_loaded()
        return engine

    return UnloadedEngine.of(engine_config(settings), load, output.note) or load()


def model_note(resolved: Resolved) -> str:
    """Say which model was chosen without a setting, and how to choose another; "" if one is set."""
    name = resolved.settings.model
    if resolved.origin["model"] == OF_THE_STORE:
        return f"model: {name}, the last one given to precompute; for all commands: cacheblend config set model {name}"
    return "" if name else FALLBACK_NOTE


def note_model(resolved: Resolved, output: Output) -> None:
    """Say once, on a terminal, which model was chosen without a setting."""
    if not output.is_json:
        hint(output, model_note(resolved))


def hint(output: Output, text: str, name: str = "", *, daily: bool = False) -> None:
    """Show a message on a terminal, unless this user has seen it, ever or today. name: of the message, if its text
    varies."""
    place, shown = user_cache.place("hints", name or text), str(date.today()) if daily else ""
    if text and output.err_tty and not output.quiet and not user_cache.recall(place).endswith(f"{shown}\n"):
        user_cache.keep(place, f"shown {shown}\n" if daily else "shown\n")
        output.note(text)


def _exit_on_lost_rank(output: Output, engine: Engine, error: CacheBlendError) -> NoReturn:
    """Exit from any thread when a rank is lost: collective operations with the others may never return."""
    output.error(error.message, error.hint)
    with suppress(OSError):
        engine.remove_files()
    os._exit(error.exit_code)
