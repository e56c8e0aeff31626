"""cacheblend ask: a question over stored chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.answers import Explained, Streams, changed, show_answer, show_plan
from cacheblend_cli.cli.batch import Answered, Results, answer_all, run_batch
from cacheblend_cli.cli.inputs import Asked, read_asked
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.pages import answer_page, write_page
from cacheblend_cli.cli.warm import Flags, WarmAsk
from cacheblend_cli.errors import ExitCode, NotFoundError, UsageError
from cacheblend_cli.settings import Resolved
from cacheblend_cli.text_files import read_text

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore


@options.with_settings(*options.asking())
def ask(
    resolved: Resolved,
    question: Annotated[
        str | None,
        typer.Argument(help="The question; - reads it from stdin, as a pipe is without it.", show_default=False),
    ] = None,
    chunks: Annotated[
        str | None,
        typer.Option(
            help="ID,ID or a file of ids or - for stdin. Else they are searched.",
            show_default=False,
            autocompletion=completion.chunk_ids,
        ),
    ] = None,
    source: options.Source = None,
    everywhere: options.Everywhere = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End the answer before this text (repeatable).", rich_help_panel="The answer", show_default=False
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Report this many alternatives a token (--json).", rich_help_panel="The answer", show_default=False
        ),
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(help='JSON lines of {"question", "chunks"?}: many questions, one model load.', show_default=False),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions of --batch to answer side by side.")] = 8,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Keep the answers of --batch in this file (JSON lines), and ask only what it does not answer yet.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with a full prefill of the same prompt.")] = False,
    confirm: Annotated[
        bool,
        typer.Option("--confirm", help="Answer, check with a full prefill, correct; exit code 6 if changed."),
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say what each layer, chunk and token did.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the answer and its sources as a page.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be loaded and computed.")] = False,
    ids: Annotated[
        bool, typer.Option("--ids", help="Add prompt_ids and generated_ids to --json.", rich_help_panel="The answer")
    ] = False,
    save: Annotated[
        bool,
        typer.Option(
            "--save/--no-save",
            help="Store the KV of chunks that had to be computed.",
            rich_help_panel="This machine and the store",
        ),
    ] = True,
    json_schema: Annotated[
        Path | None,
        typer.Option(help="File with the JSON schema of the answer.", rich_help_panel="The answer", show_default=False),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(help="Regular expression of the answer.", rich_help_panel="The answer", show_default=False),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Load the model here, also where an engine runs (cacheblend serve).")
    ] = False,
    json: options.Json = False,
    quiet: options.NoMessages = False,
) -> None:
    """Answer a question over stored chunks: load their KV, repair it for the new context, decode.

    Without --chunks they are searched, by default below the current project: the nearest directory from here up that
    holds a cacheblend.toml or a .git.

    The answer goes to stdout; sources, tokens, share recomputed and times go to stderr.
    """
    from cacheblend_cli.corpus.scopes import EVERYTHING
    from cacheblend_cli.corpus.search import check_context

    output, settings = Output(quiet=quiet), resolved.settings
    check_context(settings.context)
    asked = read_asked(question, chunks, batch)
    if html and (batch or dry_run):
        raise UsageError("--html is of one answer", "leave --batch and --dry-run out")
    if resume is not None and batch is None:
        raise UsageError("--resume is of a batch, and there is no --batch", "give --batch FILE")
    results = None if resume is None or dry_run else Results(resume)
    if results is not None:
        asked = results.left(asked)
    if batch is None and not local and not (html or json_schema or regex):
        flags = Flags(
            source, everywhere, tuple(stop or ()), logprobs, verify, confirm, explain, dry_run, ids, save, json
        )
        warm = WarmAsk.over(resolved, flags, output)
        if warm is not None and warm.ask(asked[0].question, asked[0].chunks):
            if warm.exit_code:
                raise typer.Exit(warm.exit_code)
            return
    options.import_engine()
    from cacheblend_cli.runtime.config import BlendConfig
    from cacheblend_cli.runtime.model_sampling import as_the_model, sampling_of

    blend, auto = BlendConfig.of(settings), settings.ratio == "auto"
    schema = None if json_schema is None else read_text(json_schema)
    sampling = sampling_of(resolved, stop=tuple(stop or ()), logprobs=logprobs, json_schema=schema, regex=regex)
    with options.open_store(settings, write=False) as reading:
        if batch is None:  # what is wrong with the only question is said before the model is loaded
            _keys(reading, asked[0])
    engine = options.load_engine(settings, output)
    sampling = as_the_model(sampling, resolved, engine.model)
    from cacheblend_cli.api import Answer, Lookup, Question
    from cacheblend_cli.runtime.jobs import Job

    def question_of(item: Asked) -> Question:
        keys = _keys(kv_store, item)
        what = Question(item.question, keys or (), blend, sampling, settings.salt)
        return engine.search(kv_store, what, lookup) if keys is None else what

    def job_of(item: Asked) -> Job:
        return Job(question_of(item), verify=verify, confirm=confirm, auto=auto, save_holes=save)

    def show(found: Answer, what: Question, extra: dict[str, str]) -> None:
        tokens = engine.token_uses(found) if html or explain else []
        if html:
            write_page(html, answer_page(what.text, found, tokens))
        told = None
        if explain:
            told = Explained([*engine.remarks, *engine.prompt_differences(kv_store, what, found)], tokens)
        show_answer(found, output, json=json, ids=ids, explain=told, extra=extra)
        sources.extend(chunk.source for chunk in found.chunks)

    def show_one(item: Answered) -> dict[str, Any]:
        assert item.answer is not None
        assert item.job is not None
        extra = {"question": item.asked.question}
        if not json:
            output.text(item.answer.text, end="")
        show(item.answer, item.job.question, extra)
        if code := changed(item.answer):
            differing.append(code)
        return {**extra, **item.answer.to_dict(ids=ids)}

    def answer(item: Asked) -> int:
        extra = {} if batch is None else {"question": item.question}
        what = question_of(item)
        if dry_run:
            show_plan(engine.plan(kv_store, what, auto=auto), output, json=json, extra=extra)
            return 0
        streams = None if json else Streams(output, draft=confirm)
        found = engine.ask(
            kv_store,
            what,
            on_text=streams.text if streams else None,
            on_reasoning=streams.reasoning if streams else None,
            verify=verify,
            confirm=confirm,
            save_holes=save,
            auto=auto,
        )
        if streams is not None:
            streams.end_reasoning()
        show(found, what, extra)
        return changed(found)

    sources: list[str] = []
    differing: list[int] = []
    with options.store_in_use(settings, write=not dry_run) as kv_store:
        searched = any(item.chunks is None for item in asked)
        scope = options.scope_of(kv_store, source, everywhere, output, settings.collection) if searched else EVERYTHING
        lookup = Lookup.of(settings, scope, output.note) if searched else Lookup()
        if batch is None or dry_run:
            failed = [code for item in asked if (code := _guarded(answer, item, batch is not None, output, json))]
        else:
            answers = answer_all(engine, kv_store, asked, job_of, concurrency)
            failed = run_batch(answers, show_one, output, as_json=json, results=results) + differing
    if results is not None:
        results.close()
    if not dry_run:
        options.about_demo(settings, output, sources)
    if failed:
        raise typer.Exit(next((code for code in failed if code != ExitCode.CHANGED), ExitCode.CHANGED))


def _guarded(answer: Callable[[Asked], int], item: Asked, batch: bool, output: Output, json: bool) -> int:
    """Answer. A question of a batch that cannot be answered is reported, and the others go on; returns its exit code."""
    from cacheblend_store import AmbiguousId, ChunkNotFound

    from cacheblend_cli.cli.exits import report

    if batch and not json:
        output.note(f"> {item.question}")
    try:
        return answer(item)
    except (UsageError, NotFoundError, ChunkNotFound, AmbiguousId) as error:
        if not batch:
            raise
        if json:
            output.json({"question": item.question, "error": error.message})
        return report(error, output)


def _keys(store: ChunkStore, asked: Asked) -> list[bytes] | None:
    """Keys of the chunks that were named, None when they are to be searched. Raises ChunkNotFound, AmbiguousId."""
    return None if asked.chunks is None else [store.resolve(name) for name in asked.chunks]
