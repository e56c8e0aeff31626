"""cacheblend ask: a question over stored chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.answer_html import answer_page
from cacheblend_cli.cli.answer_output import AnswerResult, AnswerStream, changed, now, show_answer, show_plan
from cacheblend_cli.cli.ask_batch import AnswerFile, question_fields, run_batch
from cacheblend_cli.cli.ask_session import AskSession, BatchResult
from cacheblend_cli.cli.inputs import QuestionInput, read_questions
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import store_in_use
from cacheblend_cli.errors import ExitCode, UsageError
from cacheblend_cli.settings import Resolved
from cacheblend_cli.text_files import read_text, write_text
from cacheblend_cli.types import AskOptions, sampling_of

_ANSWER, _MACHINE = "The answer", "This machine and the store"  # panels of the help


@options.with_settings(*options.asking(), "keep_alive")
def ask(
    resolved: Resolved,
    question: Annotated[
        str | None, typer.Argument(help="The question. Without it, or with -, it is read from stdin.")
    ] = None,
    chunks: Annotated[
        str | None,
        typer.Option(
            help="Chunk ids separated by commas, a file of ids, or - for stdin. Default: search.",
            autocompletion=completion.chunk_ids,
        ),
    ] = None,
    source: options.Source = None,
    everywhere: options.Everywhere = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text (repeatable).", rich_help_panel=_ANSWER)
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Report this many alternatives a token (--json).", rich_help_panel=_ANSWER)
    ] = None,
    batch: Annotated[
        Path | None, typer.Option(help='Answer many questions: JSON lines of {"question", "chunks"?}; - is stdin.')
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions of --batch to answer at the same time.")] = 8,
    resume: Annotated[
        Path | None,
        typer.Option(help="Save the answers of --batch in this JSON lines file, and skip those it has."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the answer with a full prefill's.")] = False,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Answer, then correct by a full prefill; exit code 6 if changed.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what was reused and recomputed: chunks, layers, tokens.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write the answer and its sources as a web page.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be loaded and computed.")] = False,
    ids: Annotated[
        bool, typer.Option("--ids", help="Add prompt_ids and generated_ids to --json.", rich_help_panel=_ANSWER)
    ] = False,
    save: Annotated[
        bool,
        typer.Option(
            "--save/--no-save", help="Store the KV of chunks that had to be computed.", rich_help_panel=_MACHINE
        ),
    ] = True,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema for the answer.", rich_help_panel=_ANSWER)
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression for the answer.", rich_help_panel=_ANSWER)
    ] = None,
    local: options.Local = False,
    verbose: options.Verbose = False,
    json: options.Json = False,
    quiet: options.NoMessages = False,
) -> None:
    """Answer a question over stored documents.

    Searches the chunks of the current project (the nearest folder upwards with a cacheblend.toml or .git), loads their
    KV, recomputes a part of it, and decodes. The answer goes to stdout; sources and times go to stderr.
    """
    from cacheblend_cli.corpus.search import check_context

    output, settings = Output(quiet=quiet, verbose=verbose or explain), resolved.settings
    check_context(settings.context)
    questions = read_questions(question, chunks, batch)
    if html and (batch or dry_run):
        raise UsageError("--html needs a single answer", "omit --batch and --dry-run")
    if resume is not None and batch is None:
        raise UsageError("--resume needs --batch", "add --batch FILE")
    answer_file = None if resume is None or dry_run else AnswerFile(resume)
    if answer_file is not None:
        questions = answer_file.remaining(questions)
    ask_options = AskOptions(
        verify=verify,
        confirm=confirm,
        save=save,
        stream=not json and batch is None,
        ids=ids,
        explain=explain,
        tokens=explain or html is not None,
    )
    schema = None if json_schema is None else read_text(json_schema)
    sampling = {"stop": tuple(stop or ()), "logprobs": logprobs, "json_schema": schema, "regex": regex}
    sampling_of(settings, **sampling)  # validate before opening anything
    sources: list[str] = []
    codes: list[int] = []

    def show(item: QuestionInput, result: AnswerResult, extra: dict[str, Any]) -> None:
        show_answer(result, output, json=json, extra=extra, seconds=None if batch else now())
        if html:
            write_text(
                html, answer_page(item.question, result.answer, result.tokens), "choose another place for --html"
            )
        sources.extend(chunk.source for chunk in result.answer.chunks)
        codes.append(changed(result.answer))

    def show_one(item: BatchResult) -> dict[str, Any]:
        extra = question_fields(item.question_input)
        assert item.result is not None
        if not isinstance(item.result, AnswerResult):
            show_plan(item.result, output, json=json, extra=extra)
            return extra
        if not json:
            if codes and quiet:  # --quiet hides the questions that otherwise separate answers
                output.text("")
            output.text(item.result.answer.text, end="")
        show(item.question_input, item.result, extra)
        return {**extra, **item.result.record}

    with (
        store_in_use(settings, write=not dry_run) as store,
        AskSession(resolved, output, store, ask_options, local=local, sampling=sampling) as session,
    ):
        if any(item.chunks is None for item in questions):
            session.scope = options.scope_of(store, source, everywhere, output.detail, settings.collection)
        if batch is not None:
            batch_results = session.plans(questions) if dry_run else session.answers(questions, concurrency)
            codes += run_batch(batch_results, show_one, output, as_json=json, answer_file=answer_file)
        elif dry_run:
            show_plan(session.plan(questions[0]), output, json=json, extra={})
        else:
            streams = AnswerStream(output, draft=confirm)
            result = session.ask(questions[0], None if json else streams)
            streams.end_reasoning()
            show(questions[0], result, {})
            session.suggest_background()
    if answer_file is not None:
        answer_file.file.close()
    if failed := [code for code in codes if code]:
        raise typer.Exit(next((code for code in failed if code != ExitCode.CHANGED), ExitCode.CHANGED))
