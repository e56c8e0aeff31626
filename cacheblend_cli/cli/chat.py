"""cacheblend chat: a conversation over stored chunks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from cacheblend_store.private_files import make_folder, open_file
from platformdirs import user_state_path
from typer import Option

from cacheblend_cli.cli import options
from cacheblend_cli.cli.answer_output import AnswerResult, AnswerStream, by_rank, cut_note, show_summary
from cacheblend_cli.cli.ask_session import AskSession
from cacheblend_cli.cli.exits import report
from cacheblend_cli.cli.explain_output import chunk_lines, layer_lines
from cacheblend_cli.cli.flags import ASK
from cacheblend_cli.cli.inputs import QuestionInput, read_ids
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import store_in_use
from cacheblend_cli.cli.units import counted
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.corpus.scopes import holds
from cacheblend_cli.errors import DeviceError, ExitCode, NothingFound, PromptTooLong, UsageError
from cacheblend_cli.settings import Resolved
from cacheblend_cli.text_files import decode_text, write_text
from cacheblend_cli.types import Answer, AskOptions

COMMANDS = {
    "/sources": "show the chunks of the last answer",
    "/why": "show what was computed for the last answer, by chunk and layer",
    "/docs": "list the documents that are searched",
    "/save": "write the conversation to a file: /save FILE.md or FILE.json",
    "/forget": "start a new conversation",
    "/help": "show this list",
    "/quit": "end the chat",
}


@dataclass
class ChatState:
    named: tuple[str, ...] | None = None  # chunk ids, None to search for each question
    turns: list[tuple[str, str]] = field(default_factory=list)  # (question, answer)
    last: Answer | None = None  # the last answer

    @property
    def history(self) -> list[str]:
        """Messages alternately by user and model."""
        return [text for turn in self.turns for text in turn]


@options.with_settings(*ASK)
def chat(
    resolved: Resolved,
    chunks: str | None = Option(None, help="Chunk ids: ID,ID or a file of ids. Default: search for each question."),
    source: options.Source = None,
    everywhere: options.Everywhere = False,
    local: options.Local = False,
    verbose: options.Verbose = False,
    quiet: options.NoMessages = False,
) -> None:
    """Hold a conversation over stored documents. Each question is searched for and follows the earlier turns.

    Questions are read from the terminal, or one per line from a pipe. /help lists the commands.
    """
    output = Output(quiet=quiet, verbose=verbose)
    interactive = sys.stdin.isatty() and output.out_tty
    named = None if chunks is None else read_ids(chunks)
    settings = resolved.settings
    with (
        store_in_use(settings) as store,
        AskSession(resolved, output, store, AskOptions(drafts=False, estimate_full=verbose), local=local) as session,
    ):
        if named is None:
            session.scope = options.scope_of(store, source, everywhere, output.detail, settings.collection)
        state = ChatState(named)
        for name in named or ():
            session.store.resolve(name)
        if interactive:
            output.note(f"questions; {', '.join(COMMANDS)}; Ctrl-D ends")
        failed = 0
        for line in _lines(interactive):
            if line.split()[0] in ("/quit", "/exit"):
                break
            failed = _handle(line, state, session, output, interactive=interactive) or failed
    if failed and not interactive:
        raise typer.Exit(failed)


def _handle(line: str, state: ChatState, session: AskSession, output: Output, *, interactive: bool) -> int:
    """Run a command or answer a question, and return the exit code of its error. Raises Exit if chat cannot go on."""
    try:
        (_run_command if line.startswith("/") else _turn)(line, state, session, output)
    except KeyboardInterrupt:
        if not interactive:
            raise
        output.text("")
        if session.is_lost:
            error = "the tensor-parallel processes were interrupted and have ended"
            raise DeviceError(error, "start chat again") from None
        output.note("interrupted; this turn is forgotten")
    except Exception as error:  # report it like `ask`, and continue
        failed = report(error, output)
        if failed == ExitCode.INTERNAL or session.is_lost:
            raise typer.Exit(failed) from error
        return failed
    return ExitCode.OK


def _turn(line: str, state: ChatState, session: AskSession, output: Output) -> None:
    streams, asked_at = AnswerStream(output), time.perf_counter()
    result = _ask(line, state, session, streams, output)
    seconds = time.perf_counter() - asked_at
    streams.end(result.answer)
    for note in result.new_notes:
        output.warn(note)
    if cut := cut_note(result.answer):
        output.note(cut)
    show_summary(result, output, seconds)
    session.note_model()
    session.suggest_check(result.answer)
    state.turns.append((line, result.answer.text))
    state.last = result.answer


def _ask(question: str, state: ChatState, session: AskSession, streams: AnswerStream, output: Output) -> AnswerResult:
    """Answer a turn. If the conversation is too long, its first turn is dropped."""
    named = state.named
    while True:
        try:
            return session.ask(QuestionInput(question, named), streams, state.history)
        except PromptTooLong:
            if not state.turns:
                raise
            del state.turns[0]
            output.note("the conversation is too long: its first turn is forgotten")
        except NothingFound:  # a question such as "why?": it is about what the last one was about
            if named is not None or state.last is None:
                raise
            named = tuple(chunk.id for chunk in state.last.chunks)


def _lines(interactive: bool) -> Iterator[str]:
    for line in _typed() if interactive else sys.stdin.buffer:
        text = (decode_text(line, "stdin") if isinstance(line, bytes) else line).strip()
        if text:
            yield text


def _typed() -> Iterator[str]:
    read = _reader()
    while True:
        try:
            yield read()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _reader() -> Callable[[], str]:
    """Return a function that reads a line, with editing and history if prompt_toolkit is installed."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory
    except ImportError:
        return lambda: input("> ")
    file = user_state_path("cacheblend") / "chat_history"
    try:
        make_folder(file.parent)
        os.close(open_file(file, os.O_RDWR | os.O_CREAT))
        history: FileHistory | InMemoryHistory = FileHistory(str(file))
    except OSError:  # as in a read-only home
        history = InMemoryHistory()
    session: PromptSession[Any] = PromptSession(
        history=history,
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
        reserve_space_for_menu=0,
    )
    return lambda: str(session.prompt("> "))


def _run_command(line: str, state: ChatState, session: AskSession, output: Output) -> None:
    """Run a command line that begins with a slash. Raises UsageError."""
    command, _, argument = line.partition(" ")
    match command:
        case "/help":
            for name, help_text in COMMANDS.items():
                output.text(f"{name:<9} {help_text}")
        case "/docs":
            from cacheblend_cli.corpus.search_index import searchable

            for name in (n for n in searchable(session.store) if holds(session.scope, n)):
                output.line(shown(name))
        case "/forget":
            state.turns, state.last = [], None
            output.note("started a new conversation")
        case "/save":
            _save(argument.strip(), state, output)
        case "/sources" | "/why":
            if state.last is None:
                raise UsageError("no question was asked yet", "ask a question first")
            if command == "/why":
                for text in (*chunk_lines(state.last), *layer_lines(state.last)):
                    output.line(text)
            else:
                rows = [(c.id[:12], c.tokens, c.status, c.source) for c in by_rank(state.last.chunks)]
                output.table(("chunk", "tokens", "status", "source"), rows, right=(1,), ends=(3,))
        case _:
            raise UsageError(f"unknown command {command}", f"known: {', '.join(COMMANDS)}")


def _save(name: str, state: ChatState, output: Output) -> None:
    if not name:
        raise UsageError("/save needs a file", "/save chat.md, or chat.json")
    path = Path(name).expanduser()
    if path.suffix == ".json":
        text = json.dumps([{"question": q, "answer": a} for q, a in state.turns], ensure_ascii=False, indent=1) + "\n"
    else:
        text = "".join(f"## {q}\n\n{a}\n\n" for q, a in state.turns)
    write_text(path, text, "name another file", new=True)
    output.note(f"wrote {counted(len(state.turns), 'turn')} to {path}")
