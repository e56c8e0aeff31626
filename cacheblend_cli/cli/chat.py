"""cacheblend chat: a conversation over stored chunks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.answering import Answering
from cacheblend_cli.cli.answers import Result, Streams, cut_note, layer_lines, show_summary
from cacheblend_cli.cli.exits import report
from cacheblend_cli.cli.inputs import QuestionInput, read_ids
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import store_in_use
from cacheblend_cli.errors import CacheBlendError, DeviceError, ExitCode, PromptTooLong, UsageError
from cacheblend_cli.settings import Resolved
from cacheblend_cli.text_files import write_text

COMMANDS = {
    "/sources": "the chunks of the last answer, and how their KV came to be",
    "/why": "what the last answer computed, chunk by chunk and layer by layer",
    "/docs": "the documents that are searched",
    "/save": "write the conversation to a file: /save FILE.md or FILE.json",
    "/forget": "begin a new conversation",
    "/help": "this",
    "/quit": "end",
}
_BAR = 20  # columns


@dataclass
class Conversation:
    """named: ids of the chunks that it is over, None to search for each question. turns: question and answer of each.
    last: the last answer, None before it."""

    named: tuple[str, ...] | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)
    last: Any = None

    @property
    def history(self) -> list[str]:
        """Messages of user and model in turn."""
        return [text for turn in self.turns for text in turn]


@options.with_settings(*options.asking(), "keep_alive")
def chat(
    resolved: Resolved,
    chunks: Annotated[
        str | None,
        typer.Option(help="Chunk ids: ID,ID or a file of ids. Without it, every question searches."),
    ] = None,
    source: options.Source = None,
    everywhere: options.Everywhere = False,
    local: options.Local = False,
    verbose: options.Verbose = False,
    quiet: options.NoMessages = False,
) -> None:
    """Hold a conversation: each question follows the earlier turns, over the chunks that suit it.

    Questions are read from the terminal, or a line each from a pipe. /help says what else can be typed.
    """
    output = Output(quiet=quiet, verbose=verbose)
    interactive = sys.stdin.isatty() and output.out_tty
    named = None if chunks is None else read_ids(chunks)
    settings = resolved.settings
    with (
        store_in_use(settings) as store,
        Answering(resolved, output, store, local=local) as answering,
    ):
        if named is None:
            answering.scope = options.scope_of(store, source, everywhere, output.detail, settings.collection)
        talk = Conversation(named)
        for name in named or ():
            answering.store.resolve(name)
        if interactive:
            output.note(f"questions; {', '.join(COMMANDS)}; Ctrl-D ends")
        failed = 0
        for line in _lines(interactive):
            if line.startswith("/"):
                if line.split()[0] in ("/quit", "/exit"):
                    break
                try:
                    _do(line, talk, answering, output)
                except CacheBlendError as error:
                    failed = report(error, output)
                continue
            try:
                _turn(line, talk, answering, output)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                output.text("")
                if answering.is_lost:
                    raise DeviceError("the ranks were interrupted, and have ended", "start chat again") from None
                output.note("interrupted; this turn is forgotten")
            except Exception as error:  # reported as by `ask`; the conversation goes on
                failed = report(error, output)
                if failed == ExitCode.INTERNAL or answering.is_lost:
                    raise typer.Exit(failed) from error
    if failed and not interactive:
        raise typer.Exit(failed)


def _turn(line: str, talk: Conversation, answering: Answering, output: Output) -> None:
    streams, asked_at = Streams(output), time.perf_counter()
    result = _answered(line, talk, answering, streams, output)
    seconds = time.perf_counter() - asked_at
    streams.end_reasoning()
    output.text("")
    for note in result.new_notes:
        output.warn(note)
    if cut := cut_note(result.answer):
        output.note(cut)
    show_summary(result, output, seconds)
    talk.turns.append((line, result.answer.text))
    talk.last = result.answer


def _answered(question: str, talk: Conversation, answering: Answering, streams: Streams, output: Output) -> Result:
    """Answer a turn. If the conversation is too long, its first turn is dropped."""
    named = talk.named
    while True:
        try:
            return answering.ask(QuestionInput(question, named), streams, talk.history)
        except PromptTooLong:
            if not talk.turns:
                raise
            del talk.turns[0]
            output.note("the conversation is too long: its first turn is forgotten")
        except CacheBlendError as error:  # a question such as "why?": it is about what the last one was about
            if error.exit_code != ExitCode.NOT_FOUND or named is not None or talk.last is None:
                raise
            named = tuple(chunk.id for chunk in talk.last.chunks)


def _lines(interactive: bool) -> Iterator[str]:
    """Yield lines of input, each a question or a command."""
    lines = _typed() if interactive else _piped()
    return (line.strip() for line in lines if line.strip())


def _typed() -> Iterator[str]:
    read = _reader()
    while True:
        try:
            line = read()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        yield line


def _piped() -> Iterator[str]:
    for line in sys.stdin.buffer:
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError("stdin is not UTF-8", "convert it: iconv -t utf-8") from error


def _reader() -> Callable[[], str]:
    """Line editing and a history that lasts, where prompt_toolkit is installed."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory
    except ImportError:
        return lambda: input("> ")
    from platformdirs import user_state_path

    file = user_state_path("cacheblend") / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
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


def _do(line: str, talk: Conversation, answering: Answering, output: Output) -> None:
    """Do what a line that begins with a slash says. Raises UsageError."""
    command, _, argument = line.partition(" ")
    match command:
        case "/help":
            for name, help_text in COMMANDS.items():
                output.text(f"{name:<9} {help_text}")
        case "/docs":
            from cacheblend_cli.corpus.places import shown
            from cacheblend_cli.corpus.scopes import holds
            from cacheblend_cli.corpus.search import searchable

            for name in (n for n in searchable(answering.store) if holds(answering.scope, n)):
                output.line(shown(name))
        case "/forget":
            talk.turns, talk.last = [], None
            output.note("the conversation is forgotten")
        case "/save":
            _save(argument.strip(), talk, output)
        case "/sources" | "/why":
            if talk.last is None:
                raise UsageError("nothing was asked yet", "ask something first")
            (_sources if command == "/sources" else _why)(talk.last, output)
        case _:
            raise UsageError(f"unknown command {command}", f"known: {', '.join(COMMANDS)}")


def _sources(answer: Any, output: Output) -> None:
    rows = [(c.id[:12], c.tokens, c.status, c.source) for c in answer.chunks]
    output.table(("chunk", "tokens", "status", "source"), rows, right=(1,), ends=(3,))


def _why(answer: Any, output: Output) -> None:
    """A bar a chunk, as long as its share that was computed."""
    for c in answer.chunks:
        share = c.recomputed / c.tokens if c.tokens else 0.0
        filled = round(share * _BAR) or int(c.recomputed > 0)
        bar = "#" * filled + "." * (_BAR - filled)
        output.line(
            f"{c.id[:12]}  {bar}  {c.recomputed:>5} of {c.tokens:>5} tokens computed, {c.status:<8}  {c.source}"
        )
    for line in layer_lines(answer):
        output.line(line)


def _save(name: str, talk: Conversation, output: Output) -> None:
    if not name:
        raise UsageError("/save needs a file", "/save talk.md, or talk.json")
    path = Path(name).expanduser()
    if path.suffix == ".json":
        text = json.dumps([{"question": q, "answer": a} for q, a in talk.turns], ensure_ascii=False, indent=1) + "\n"
    else:
        text = "".join(f"## {q}\n\n{a}\n\n" for q, a in talk.turns)
    write_text(path, text, "name another file", new=True)
    output.note(f"{len(talk.turns)} turns are in {path}")
