"""cacheblend ask: a question over stored chunks, or a resumable batch of questions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from cacheblend_store.conversion import convert
from msgspec import Struct
from typer import Argument, Option

from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.answer_output import AnswerResult, AnswerStream, show_answer, show_plan
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


class AnswerRecord(Struct, frozen=True):
    """Question and named chunks of an answer's record."""

    question: str  # with --batch: the question
    asked_chunks: tuple[str, ...] | None = None  # with --batch: chunks that the question names


class AnswerFile(JsonLines[AnswerRecord]):
    """The file of --resume: answers in the order of the questions. An incomplete last line is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(path, lambda record: convert(record, AnswerRecord), '{"question": "', "an answer of a batch")

    def remaining(self, questions: Sequence[QuestionInput], output: Output) -> list[QuestionInput]:
        """Return the questions without an answer in the file. Duplicates count separately."""
        answered, found = Counter(self.rows), []
        for item in questions:
            key = AnswerRecord(item.question, item.chunks)
            if answered[key] > 0:
                answered[key] -= 1
            else:
                found.append(item)
        if not found:
            output.note(f"{self.path} already has all answers")
        return found


class AnswerView:
    """Shows answers and plans. codes: exit codes of the answers so far. html: file for the answer as a page. notes: to
    add to every answer; the user has seen them."""

    def __init__(self, output: Output, *, html: Path | None, notes: Sequence[str]) -> None:
        self._output, self._json, self._html, self._notes = output, output.is_json, html, notes
        self.codes: list[int] = []

    @property
    def exit_code(self) -> int:
        """The first error, else CHANGED if an answer changed."""
        errors = (code for code in self.codes if code not in (ExitCode.OK, ExitCode.CHANGED))
        return next(errors, max(self.codes, default=0))

    def ask(self, session: AskSession, item: QuestionInput, *, draft: bool) -> None:
        """Answer a question while its text is shown. draft: the answer may still change."""
        streams = AnswerStream(self._output, draft=draft)
        result = session.ask(item, None if self._json else streams)
        if not self._json:
            streams.end(result.answer)
        self._show(item, result.with_notes(self._notes), {}, since_process_start())
        if not self._json:
            session.note_model()
            session.suggest_check(result.answer)

    def batch(self, results: Iterable[BatchResult], answer_file: AnswerFile | None) -> None:
        """Show answers or plans as they finish. Report questions that fail, and continue."""
        started, records = time.perf_counter(), list[dict[str, Any]]()
        for item in results:
            if not self._json:
                self._output.note(f"> {item.question_input.question}")
            extra: dict[str, Any] = {"question": item.question_input.question}
            if item.question_input.chunks is not None:
                extra |= {"asked_chunks": list(item.question_input.chunks)}
            if item.error is not None:
                self._failed(item.error, extra)
            elif isinstance(item.result, AnswerResult):
                records.append(self._answered(item.question_input, item.result.with_notes(self._notes), extra))
                if answer_file is not None:
                    answer_file.add(records[-1])
            elif item.result is not None:
                show_plan(item.result, self._output, extra)
        if answer_file is not None:
            answer_file.close()
        count, seconds = len(records), time.perf_counter() - started
        if count > 1:
            speed = sum(record["generated_tokens"] for record in records) / seconds
            self._output.note(
                f"{count} answers in {seconds:.1f} s: {count / seconds:.2f} questions/s, {speed:.1f} tokens/s"
            )

    def _answered(self, item: QuestionInput, result: AnswerResult, extra: dict[str, Any]) -> dict[str, Any]:
        if not self._json:
            if self.codes and self._output.quiet:  # --quiet hides the questions that otherwise separate answers
                self._output.text("")
            self._output.text(result.answer.text)
        self._show(item, result, extra, None)
        return {**extra, **result.record}

    def _failed(self, error: Exception, extra: dict[str, Any]) -> None:
        """Report an error that concerns one question; raise another."""
        if getattr(error, "exit_code", None) not in (ExitCode.USAGE, ExitCode.NOT_FOUND):
            raise error
        if self._json:
            self._output.json({**extra, "error": getattr(error, "message", "")})
        self.codes.append(report(error, self._output))

    def _show(self, item: QuestionInput, result: AnswerResult, extra: dict[str, Any], seconds: float | None) -> None:
        show_answer(result, self._output, extra, seconds)
        if self._html is not None:
            from cacheblend_cli.cli.answer_html import answer_page

            page = answer_page(item.question, result.answer, result.tokens)
            write_text(self._html, page, "choose another place for --html")
            self._output.note(f"wrote {self._html}")
        check = result.answer.confirmation
        self.codes.append(ExitCode.CHANGED if check and not check.confirmed else ExitCode.OK)


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
    logprobs: int | None = options.answer_option(None, help="Report this many alternatives per token (--json)."),
    batch: Path | None = Option(
        None,
        help='Answer many questions: JSON lines of {"question", "chunks"?}; - is stdin. Prints JSON lines, on a terminal text.',
    ),
    concurrency: int = options.answer_option(8, min=1, help="Questions of --batch to answer at the same time."),
    resume: Path | None = options.answer_option(
        None, help="Save the answers of --batch in this JSON lines file, and skip those it has."
    ),
    verify: bool = Option(False, "--verify", help="Compare the answer with a full prefill's."),
    confirm: bool = Option(
        False,
        "--confirm",
        help="Stream a draft, then replace it by the full prefill's answer if they differ (exit code 6). --confirm marked: only if "
        "something in the draft is not in the sources, or it says that they lack what a matching one may have.",
    ),
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
    json = json or (batch is not None and not Output().out_tty)
    output, settings = Output(json=json, quiet=quiet, verbose=verbose or explain), resolved.settings
    _check_files(html=html, resume=resume, batch=batch, dry_run=dry_run)
    schema = None if json_schema is None else read_text(json_schema)
    sampling = sampling_of(settings, stop=tuple(stop or ()), logprobs=logprobs, json_schema=schema, regex=regex)
    searches = any((source, everywhere, resolved.origin["top_k"] == "flag"))
    questions, document = _read(question, chunks, batch, output, searches=searches)
    answer_file = None if dry_run or resume is None else AnswerFile(resume)
    if answer_file is not None:
        questions = answer_file.remaining(questions, output)
    ask_options = AskOptions(
        verify=verify,
        confirm=confirm,
        save=save,
        ids=ids,
        explain=explain,
        estimate_full=output.verbose,
        tokens=explain or html is not None,
    )
    view = AnswerView(output, html=html, notes=list(filter(None, [resolved.ignored_note])))
    with (
        store_in_use(settings, write=not dry_run, create=document is not None) as store,
        AskSession(resolved, output, store, ask_options, local=local, sampling=sampling, document=document) as session,
        in_prompt(document),
    ):
        if any(item.chunks is None for item in questions):
            session.scope = options.scope_of(store, source, everywhere, output.detail, settings.collection)
        if batch is not None:
            view.batch(session.plans(questions) if dry_run else session.answers(questions, concurrency), answer_file)
        elif dry_run:
            show_plan(session.plan(questions[0]), output, {})
        else:
            view.ask(session, questions[0], draft=confirm or settings.on_unsupported == "confirm")
    if view.exit_code:
        raise typer.Exit(view.exit_code)


def _check_files(*, html: Path | None, resume: Path | None, batch: Path | None, dry_run: bool) -> None:
    """Raises UsageError if --html or --resume conflicts with another flag, and for an unknown directory."""
    if html is not None and (batch or dry_run):
        raise UsageError("--html needs a single answer", "omit --batch and --dry-run")
    if html is not None and not html.parent.is_dir():
        raise UsageError(f"--html {html}: there is no directory {html.parent}", "create it first")
    if resume is not None and batch is None:
        raise UsageError("--resume needs --batch", "add --batch FILE")


def _read(
    question: str | None, chunks: str | None, batch: Path | None, output: Output, *, searches: bool
) -> tuple[list[QuestionInput], str | None]:
    """Return the questions, and the document that is piped beside a question. The answer uses that document only,
    unless `searches`."""
    questions, document = read_questions(question, chunks, batch), None
    if question not in (None, "-") and chunks != "-":
        document = piped_text(output.note, output.warn)
    if document is not None:
        output.note(f"answering from stdin ({counted(len(document), 'character')})")
    if document is not None and chunks is None and not searches:
        questions = [replace(questions[0], chunks=())]
    return questions, document
