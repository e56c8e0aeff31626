"""cacheblend ask: a question over stored chunks, or with --batch many, whose answers can be kept to resume from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from msgspec import Struct, convert
from typer import Argument, Option

from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.answer_html import answer_page
from cacheblend_cli.cli.answer_output import AnswerResult, AnswerStream, changed, show_answer, show_plan
from cacheblend_cli.cli.ask_session import AskSession, BatchResult
from cacheblend_cli.cli.exits import report
from cacheblend_cli.cli.flags import ASK
from cacheblend_cli.cli.inputs import QuestionInput, read_questions
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.piped import in_prompt, piped_text
from cacheblend_cli.cli.stores import store_in_use
from cacheblend_cli.cli.units import counted
from cacheblend_cli.clock import since_process_start
from cacheblend_cli.errors import ExitCode, UsageError
from cacheblend_cli.settings import Resolved
from cacheblend_cli.text_files import JsonLines, read_text, write_text
from cacheblend_cli.types import AskOptions, sampling_of


class _AnswerRecord(Struct, frozen=True):
    """Question and named chunks of an answer's record."""

    question: str
    asked_chunks: tuple[str, ...] | None = None


class AnswerFile(JsonLines[_AnswerRecord]):
    """The file of --resume: answers in the order of the questions. An incomplete last line is ignored."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, lambda record: convert(record, _AnswerRecord), '{"question": "', "an answer of a batch")

    def remaining(self, questions: Sequence[QuestionInput]) -> list[QuestionInput]:
        """Return the questions without an answer in the file. Duplicates count separately."""
        answered, found = Counter(self.rows), []
        for item in questions:
            key = _AnswerRecord(item.question, item.chunks)
            if answered[key] > 0:
                answered[key] -= 1
            else:
                found.append(item)
        return found


def question_fields(question_input: QuestionInput) -> dict[str, Any]:
    """Return the fields of an answer's record that identify its question."""
    return {"question": question_input.question} | (
        {} if question_input.chunks is None else {"asked_chunks": list(question_input.chunks)}
    )


def run_batch(
    batch_results: Iterator[BatchResult],
    show: Callable[[BatchResult], dict[str, Any]],
    output: Output,
    *,
    as_json: bool,
    answer_file: AnswerFile | None,
) -> list[int]:
    """Show answers or plans as they finish. Report questions that fail, continue, and return their exit codes.

    show: show one result and return its record.
    """
    started, failed, count, tokens = time.perf_counter(), [], 0, 0
    for item in batch_results:
        if not as_json:
            output.note(f"> {item.question_input.question}")
        if item.error is None:
            record = show(item)
            if isinstance(item.result, AnswerResult):
                count, tokens = count + 1, tokens + record["generated_tokens"]
                if answer_file is not None:
                    answer_file.add(record)
        elif getattr(item.error, "exit_code", None) in (ExitCode.USAGE, ExitCode.NOT_FOUND):
            if as_json:
                output.json({**question_fields(item.question_input), "error": getattr(item.error, "message", "")})
            failed.append(report(item.error, output))
        else:
            raise item.error
    seconds = time.perf_counter() - started
    if count > 1:
        output.note(
            f"{count} answers in {seconds:.1f} s: {count / seconds:.2f} questions/s, {tokens / seconds:.1f} tokens/s"
        )
    return failed


@options.with_settings(*ASK)
def ask(
    resolved: Resolved,
    question: str | None = Argument(None, help="The question. Without it, or with -, it is read from stdin."),
    chunks: str | None = Option(
        None,
        help="Chunk ids separated by commas, a file of ids, or - for stdin. Default: search.",
        autocompletion=completion.chunk_ids,
    ),
    source: options.Source = None,
    everywhere: options.Everywhere = False,
    stop: list[str] | None = options.answer_option(None, help="End the answer before this text (repeatable)."),
    logprobs: int | None = options.answer_option(None, help="Report this many alternatives a token (--json)."),
    batch: Path | None = Option(
        None,
        help='Answer many questions: JSON lines of {"question", "chunks"?}; - is stdin. Prints JSON lines, on a terminal text.',
    ),
    concurrency: int = options.answer_option(8, min=1, help="Questions of --batch to answer at the same time."),
    resume: Path | None = options.answer_option(
        None, help="Save the answers of --batch in this JSON lines file, and skip those it has."
    ),
    verify: bool = Option(False, "--verify", help="Compare the answer with a full prefill's."),
    confirm: bool = Option(False, "--confirm", help="Answer, then correct by a full prefill; exit code 6 if changed."),
    explain: bool = Option(False, "--explain", help="Show what was reused and recomputed: chunks, layers, tokens."),
    html: Path | None = Option(None, help="Write the answer and its sources as a web page."),
    dry_run: bool = Option(False, "--dry-run", help="Show what would be loaded and computed."),
    ids: bool = options.answer_option(False, "--ids", help="Add prompt_ids and generated_ids to --json."),
    save: bool = options.machine_option(
        True, "--save/--no-save", help="Store the KV of chunks that had to be computed."
    ),
    json_schema: Path | None = options.answer_option(None, help="File with a JSON schema for the answer."),
    regex: str | None = options.answer_option(None, help="Regular expression for the answer."),
    local: options.Local = False,
    verbose: options.Verbose = False,
    json: options.Json = False,
    quiet: options.NoMessages = False,
) -> None:
    """Answer a question over stored documents.

    Searches the chunks of the current project (the nearest folder upwards with a cacheblend.toml or .git), loads their
    KV, recomputes a part of it, and decodes. The answer goes to stdout; sources and times go to stderr.

    Text that is piped beside a question is the document to answer from; stored ones are searched too with -k, --source
    or --all.
    """
    from cacheblend_cli.corpus.search import check_context

    output, settings = Output(quiet=quiet, verbose=verbose or explain), resolved.settings
    json = json or (batch is not None and not output.out_tty)
    check_context(settings.context)
    questions = read_questions(question, chunks, batch)
    document = None
    if question not in (None, "-") and chunks != "-":
        document = piped_text(output.note, output.warn)
    if document is not None:
        output.note(f"answering from stdin ({counted(len(document), 'character')})")
        if chunks is None and not (source or everywhere or resolved.origin["top_k"] == "flag"):
            questions = [replace(questions[0], chunks=())]  # from stdin alone
    if html and (batch or dry_run):
        raise UsageError("--html needs a single answer", "omit --batch and --dry-run")
    if resume is not None and batch is None:
        raise UsageError("--resume needs --batch", "add --batch FILE")
    answer_file = None if resume is None or dry_run else AnswerFile(resume)
    if answer_file is not None:
        questions = answer_file.remaining(questions)
        if not questions:
            output.note(f"{resume} already has all answers")
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
    ignored = [resolved.ignored_note] if resolved.ignored else []

    def show(item: QuestionInput, result: AnswerResult, extra: dict[str, Any]) -> None:
        show_answer(result, output, json=json, extra=extra, seconds=None if batch else since_process_start())
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
        result = item.result.with_notes(ignored)
        if not json:
            if codes and quiet:  # --quiet hides the questions that otherwise separate answers
                output.text("")
            output.text(result.answer.text, end="")
        show(item.question_input, result, extra)
        return {**extra, **result.record}

    with (
        store_in_use(settings, write=not dry_run, create=document is not None) as store,
        AskSession(resolved, output, store, ask_options, local=local, sampling=sampling, document=document) as session,
        in_prompt(document),
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
            show(questions[0], result.with_notes(ignored), {})
            if not json:
                session.note_default_model()
            session.suggest_background()
    if answer_file is not None:
        answer_file.close()
    if failed := [code for code in codes if code]:
        raise typer.Exit(next((code for code in failed if code != ExitCode.CHANGED), ExitCode.CHANGED))
