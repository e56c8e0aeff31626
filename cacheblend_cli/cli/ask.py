"""cacheblend ask: a question over stored chunks."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import Answer, BlendConfig, Engine, SamplingParams
    from cacheblend_cli.settings import Settings


def ask(
    question: Annotated[
        str | None, typer.Argument(help="The question; - reads it from stdin.", show_default=False)
    ] = None,
    chunks: Annotated[
        str | None,
        typer.Option(
            help="Chunk ids: ID,ID or a file of ids or - for stdin. Without it, chunks are searched.",
            show_default=False,
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", "-k", help="Chunks to search for without --chunks.", show_default="5")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="blend, full (no reuse) or reuse (no repair).", show_default="blend")
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(help="Share of the inexact tokens to recompute.", show_default="0.15")
    ] = None,
    selector: Annotated[str | None, typer.Option(help="hkvd, first, random, all or none.", show_default="hkvd")] = None,
    deviation: Annotated[str | None, typer.Option(help="What hkvd compares: v, k or kv.", show_default="v")] = None,
    check_layer: Annotated[int | None, typer.Option(help="The layer at which hkvd compares.", show_default="1")] = None,
    block: Annotated[int | None, typer.Option(help="Choose runs of this many tokens.", show_default="1")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of the answer at most.", show_default="128")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="0")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.", show_default="1")] = None,
    sample_top_k: Annotated[
        int | None, typer.Option(help="Sample among the k likeliest; 0 is off.", show_default="0")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the likeliest.", show_default="0")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.", show_default=False)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text (repeatable).", show_default=False)
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Report this many alternatives a token (--json).", show_default=False)
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(help='JSON lines of {"question", "chunks"?}: many questions, one model load.', show_default=False),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with a full prefill of the same prompt.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say what each layer and chunk did.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be loaded and computed.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Add prompt_ids and generated_ids to --json.")] = False,
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Store the KV of chunks that had to be computed.")
    ] = True,
    model: options.Model = None,
    store: options.Store = None,
    kv_dtype: options.KvDtype = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    attention_backend: options.Backend = None,
    threads: options.Threads = None,
    salt: options.Salt = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Answer a question over stored chunks: load their KV, repair what is wrong in the new context, decode.

    The answer goes to stdout; sources, tokens, share recomputed and times go to stderr.
    """
    output = Output(quiet=quiet)
    settings = options.settings_of(
        model=model, store=store, mode=mode, ratio=ratio, selector=selector, deviation=deviation, check_layer=check_layer,
        block=block, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, sample_top_k=sample_top_k,
        min_p=min_p, seed=seed, device=device, dtype=dtype, attention_backend=attention_backend, threads=threads,
        kv_dtype=kv_dtype, salt=salt,
    )  # fmt: skip
    questions = _questions(question, chunks, batch)
    with options.open_store(settings, write=False) as kv_store:
        wanted = [(q, _chunk_ids(c, kv_store) if c is not None else None) for q, c in questions]
        blend, sampling = _configs(settings, tuple(stop or ()), logprobs)
    engine = options.load_engine(settings, output)
    with _store_for_holes(settings, save and not dry_run) as kv_store:
        for text, keys in wanted:
            if keys is None:
                keys = find_chunks(kv_store, text, settings.top_k, engine.collection_ids(settings.salt))
            if dry_run:
                _show_plan(engine, kv_store, text, keys, blend, settings.salt, output, json)
                continue
            on_text = None if json else lambda piece: output.text(piece, end="")
            answer = engine.ask(
                kv_store,
                text,
                keys,
                blend,
                sampling,
                on_text=on_text,
                verify=verify,
                save_holes=save,
                salt=settings.salt,
            )
            _show(answer, output, json, ids, explain)


def _questions(question: str | None, chunks: str | None, batch: Path | None) -> list[tuple[str, str | None]]:
    """(question, --chunks) pairs, checked before anything is loaded."""
    if batch is not None:
        if question is not None:
            raise UsageError("a question and --batch were both given", "give one of them")
        return _batch(batch, chunks)
    if question is None:
        raise UsageError("there is no question", 'write it as an argument: cacheblend ask "Who leads billing?"')
    if question == "-":
        if chunks == "-":
            raise UsageError("question and chunks cannot both come from stdin", "write the question as an argument")
        question = sys.stdin.read()
    if not question.strip():
        raise UsageError("the question is empty", 'write it as an argument: cacheblend ask "Who leads billing?"')
    return [(question, chunks)]


def _batch(path: Path, chunks: str | None) -> list[tuple[str, str | None]]:
    if str(path) != "-" and not path.is_file():
        raise NotFoundError(f"no such file: {path}", "check the path of --batch")
    lines = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    found = []
    for number, line in enumerate(lines.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = jsonlib.loads(line)
            named = row.get("chunks")
            found.append((str(row["question"]), ",".join(named) if named is not None else chunks))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path}:{number} is no question: {error!r}", 'each line is {"question": "...", "chunks": ["ID", ...]}'
            ) from error
    return found


def _chunk_ids(text: str, store: ChunkStore) -> list[bytes]:
    """Keys of ID,ID, of the ids in a file, or of those on stdin; each may be a unique prefix."""
    if text == "-":
        text = sys.stdin.read()
    elif Path(text).is_file():
        text = Path(text).read_text(encoding="utf-8")
    names: list[str] = []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("{"):
            try:
                names.append(str(jsonlib.loads(line)["id"]))
            except (ValueError, KeyError) as error:
                raise UsageError(f"no chunk id in the line {line[:60]!r}", 'each JSON line has an "id"') from error
        else:
            names += [part for part in line.replace(",", " ").split() if part]
    return [store.resolve(name) for name in names]


def _configs(settings: Settings, stop: tuple[str, ...], logprobs: int | None) -> tuple[BlendConfig, SamplingParams]:
    from cacheblend_cli.api import BlendConfig, SamplingParams
    from cacheblend_cli.engine.selectors import make_selector

    make_selector(settings.selector)
    blend = BlendConfig(
        settings.mode, settings.ratio, settings.selector, settings.deviation, settings.check_layer, settings.block,
        max(0, settings.seed),
    )  # fmt: skip
    sampling = SamplingParams(
        settings.max_tokens, settings.temperature, settings.top_p, settings.sample_top_k, settings.min_p,
        None if settings.seed < 0 else settings.seed, stop, logprobs,
    )  # fmt: skip
    return blend, sampling


def _store_for_holes(settings: Settings, save: bool) -> ChunkStore:
    """For writing, so that computed chunks can be stored; for reading where this user may not write."""
    from cacheblend_store import StorePermission

    if save:
        try:
            return options.open_store(settings, write=True)
        except StorePermission:
            pass
    return options.open_store(settings, write=False)


def find_chunks(store: ChunkStore, question: str, k: int, collections: list[str]) -> list[bytes]:
    """The k best chunks in reading order: documents by their best hit, chunks of one document by their place."""
    from cacheblend_cli.corpus.search import search

    hits = next((found for c in collections if (found := search(store, question, k, c))), [])
    if not hits:
        raise NotFoundError(
            "no stored chunk of this model matches the question",
            "precompute documents first, or name chunks with --chunks",
        )
    rank = {hit.source: i for i, hit in reversed(list(enumerate(hits)))}
    return [hit.key for hit in sorted(hits, key=lambda hit: (rank[hit.source], hit.index))]


def _show(answer: Answer, output: Output, json: bool, ids: bool, explain: bool) -> None:
    for note in answer.notes:
        output.warn(note)
    if json:
        output.json(answer.to_dict(ids=ids, explain=explain))
        return
    output.text("")
    if explain:
        for layer in answer.layers:
            deviation = "" if layer.mean_deviation is None else f", mean deviation {layer.mean_deviation:.4g}"
            output.note(
                f"layer {layer.layer:>2}  {layer.status.name:<11} {layer.rows} rows, {layer.fresh} of them reusable{deviation}"
            )
        for chunk in answer.chunks:
            output.note(
                f"chunk {chunk.id[:12]}  {chunk.status:<8} {chunk.recomputed}/{chunk.tokens} recomputed  {chunk.source}"
            )
    output.note(summary_line(answer))
    if answer.verify:
        v = answer.verify
        output.note(
            f"verify: KL {v.kl:.4g} nats to a full prefill, first token {'agrees' if v.top1_agree else 'DIFFERS'}, "
            f"full prefill {v.full_ttft_s * 1000:.0f} ms"
        )


def summary_line(answer: Answer) -> str:
    """Sources, tokens, share recomputed, time to the first token, tokens/s."""
    sources = list(dict.fromkeys(Path(c.source).name for c in answer.chunks))
    shown = ", ".join(sources[:3]) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")
    t = answer.timing
    recomputed = f"{answer.recomputed_tokens} of {answer.cached_tokens} cached tokens recomputed ({answer.recompute_fraction:.0%} of the work)"
    return (
        f"[{shown or 'no sources'}] {answer.prompt_tokens} prompt tokens, {recomputed if answer.mode != 'full' else 'full prefill'}, "
        f"first token {t.ttft_s * 1000:.0f} ms, {t.decode_tokens_per_s:.0f} tokens/s"
    )


def _show_plan(
    engine: Engine,
    store: ChunkStore,
    text: str,
    keys: list[bytes],
    blend: BlendConfig,
    salt: str,
    output: Output,
    json: bool,
) -> None:
    plan = engine.plan(store, text, keys, blend, salt)
    record: dict[str, Any] = vars(plan)
    if json:
        output.json(record)
        return
    output.table(
        ("chunk", "tokens", "status", "source"),
        [(c["id"][:12], c["tokens"], c["status"], c["source"]) for c in plan.chunks],
        right=(1,),
    )
    output.text(
        f"{plan.prompt_tokens} prompt tokens: {plan.cached_tokens} cached ({plan.exact_tokens} exact), {plan.fresh_tokens} fresh; "
        f"{plan.kv_bytes / 2**20:.1f} MiB of KV to load"
    )
