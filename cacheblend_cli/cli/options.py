"""Flags that several commands share, each declared once, and the settings they resolve to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.settings import Resolved, Settings, resolve

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import Engine
    from cacheblend_cli.cli.output import Output
    from cacheblend_cli.corpus.places import Scope

Model = Annotated[
    str | None, typer.Option(help="Model directory or hub id. Default: the bundled demo model.", show_default=False)
]
Store = Annotated[str | None, typer.Option(help="Directory of the store.", show_default=False)]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", show_default=False)]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.", show_default=False)]
Backend = Annotated[str | None, typer.Option(help="auto, torch, triton or xformers.", show_default=False)]
KvDtype = Annotated[
    str | None,
    typer.Option(
        help="How KV is stored: auto (as computed), float32, bfloat16, float16, float8_e4m3, int8 or int4.",
        show_default=False,
    ),
]
Salt = Annotated[str | None, typer.Option(help="Keep the chunks of this tenant apart.", show_default=False)]
Context = Annotated[
    str | None,
    typer.Option(
        help="Where documents are stored in several contexts: sink, document or neighbours. A document without this one "
        "is taken in the first it has of document, neighbours, sink.",
        show_default="document",
    ),
]
Window = Annotated[
    int | None,
    typer.Option(help="Tokens of a chunk with the document or neighbours before it, at most.", show_default="2048"),
]
Neighbours = Annotated[int | None, typer.Option(help="Similar chunks that neighbours takes.", show_default="3")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default=False)]
GpuMemory = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization", help="Share of a GPU's memory to use, weights included.", show_default="0.9"
    ),
]
PoolDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-pool-dtype",
        help="What KV is kept in while a question is answered: auto (as computed) or float8_e4m3.",
        show_default=False,
    ),
]
Eager = Annotated[bool | None, typer.Option("--eager", help="Decode without CUDA graphs.", show_default=False)]
Deviation = Annotated[str | None, typer.Option(help="What hkvd compares: v, k or kv.", show_default="k")]
CheckLayer = Annotated[int | None, typer.Option(help="The layer at which hkvd and perturb choose.", show_default="1")]
Gradual = Annotated[
    str | None,
    typer.Option(
        help="Several check layers, each keeping a smaller share: LAYER:RATIO,... such as 1:0.3,4:0.15.",
        show_default=False,
    ),
]
Block = Annotated[int | None, typer.Option(help="Choose runs of this many tokens.", show_default="1")]
Nucleus = Annotated[
    float | None,
    typer.Option(help="Stop when this share of the scores' sum is covered; 0 is off.", show_default="0"),
]
ProbeLayers = Annotated[
    str | None,
    typer.Option(help="Layers whose attention query and draft follow: FIRST-LAST.", show_default="the middle half"),
]
DraftTokens = Annotated[int | None, typer.Option(help="Answer tokens that draft looks ahead.", show_default="8")]
MeanShift = Annotated[
    bool | None,
    typer.Option(
        "--mean-shift/--no-mean-shift",
        help="Move what is not recomputed of a chunk by the mean change of what is.",
        show_default="no-mean-shift",
    ),
]
Source = Annotated[
    str | None,
    typer.Option(
        help="Only documents at or below this path, or that match it: docs, docs/a.md, 'docs/*.md'. From here on; /*NAME* is anywhere.",
        metavar="GLOB",
        show_default=False,
    ),
]
Everywhere = Annotated[
    bool, typer.Option("--all", help="Search all documents of the store, not only those below the current project.")
]
LockTimeout = Annotated[
    float | None, typer.Option(help="Seconds to wait for another writer of the store.", show_default="30")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Ids only, no messages.")]
NoMessages = Annotated[bool, typer.Option("--quiet", "-q", help="No messages.")]


def settings_of(**flags: Any) -> Settings:
    """Flags (None: not given) over environment, files and defaults."""
    resolved: Resolved = resolve(flags)
    return resolved.settings


def scope_of(store: ChunkStore, source: str | None, everywhere: bool, output: Output) -> Scope:
    """Which documents a search takes: what --source and --all say, else the current project's, which it says.

    Raises NotFoundError when --source matches nothing that is stored.
    """
    from cacheblend_cli.corpus.places import EVERYTHING, Scope, scope_here
    from cacheblend_cli.corpus.search import searchable

    names = searchable(store)
    if source is not None:
        scope = Scope.matching(source)
        if not any(map(scope.holds, names)):
            raise NotFoundError(f"no stored document is at, below or like {source}", "list them: cacheblend chunks ls")
        return scope
    if everywhere or not names:
        return EVERYTHING
    scope, told = scope_here(names)
    output.note(told)
    return scope


def found_elsewhere() -> NotFoundError:
    return NotFoundError(
        "none of these documents has a word of it, and others in the store do", "search them too: --all"
    )


def load_engine(settings: Settings, output: Output) -> Engine:
    """The engine the settings name; says so when that is the demo model."""
    from cacheblend_cli.api import Engine, EngineConfig

    if not settings.model:
        output.note("no --model given: using the bundled demo model, which knows the demo handbook's kind of text only")
    config = EngineConfig(
        model=settings.model or None,
        device=settings.device,
        dtype=settings.dtype,
        attention_backend=settings.attention_backend,
        block_size=settings.block_size,
        threads=settings.threads,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_dtype=settings.kv_dtype,
        eager=settings.eager,
        kv_pool_dtype=settings.kv_pool_dtype,
    )
    return Engine.load(config, output.note if output.err_tty else None, output.note)


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
