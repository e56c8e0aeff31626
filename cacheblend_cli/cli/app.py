"""The top-level commands. Importing this module imports neither torch nor transformers nor numpy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
import typer.core
import typer.main
from typer import Option

import cacheblend_cli
from cacheblend_cli.cli.flags import Command
from cacheblend_cli.errors import UsageError, did_you_mean

COMMANDS = {
    "init": ("init:init", "Choose a model for this machine."),
    "precompute": ("precompute:precompute", "Compute and store the KV cache of documents."),
    "ask": ("ask:ask", "Answer a question over stored documents."),
    "search": ("search:search", "Find stored chunks."),
    "chat": ("chat:chat", "Ask follow-up questions in a terminal."),
    "serve": ("serve:serve", "Serve OpenAI's API, and keep the model loaded for ask."),
    "ps": ("engine_list:ps", "List the engines that stay loaded."),
    "stop": ("engine_list:stop", "Stop the engines over this store, or all."),
    "mcp": ("mcp:mcp", "Serve search and ask to MCP clients."),
    "chunks": ("chunks:app", "List, show, check, move and remove stored chunks."),
    "models": ("models:app", "List, describe, check and download models."),
    "config": ("config:app", "Show and change settings."),
    "trust": ("trust:trust", "Accept the settings and the store that a project brings."),
    "doctor": ("doctor:doctor", "Check versions, device, store and model."),
    "demo": ("demo:demo", "Compare blending with full prefill, or write example documents."),
    "bench": ("bench:bench", "Measure speed on this machine."),
    "eval": ("eval:evaluate", "Measure answers against full prefill on your questions."),
}
"""Command -> (module and function or Typer app, summary). Only the module of the command that runs is imported."""
_CHECKS = ("doctor", "demo", "bench", "eval")
_MEANT = {name: f"chunks {name}" for name in ("ls", "show", "stats", "rm", "verify", "prune")} | {
    "list": "chunks ls", "pull": "models pull", "query": "ask", "ingest": "precompute", "index": "precompute", "add": "precompute",
    "status": "ps", "kill": "stop",
}  # fmt: skip
"""Subcommands without their group, and other tools' names -> command."""
RENAMED = {"sync": "precompute without PATH", "watch": "precompute --watch"}


class _Commands(typer.core.TyperGroup):
    """The top-level commands, each imported when it is run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections = {"Commands": [name for name in COMMANDS if name not in _CHECKS], "Checks and measurements": _CHECKS}
        for title, names in sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, COMMANDS[name][1]) for name in names], col_max=12)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take `help COMMAND` for `COMMAND --help`, and `version` for `--version`."""
        match args:
            case ["help", *words]:
                args = [*words, "--help"]
            case ["version", *words]:
                args = ["--version", *words]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        found = getattr(import_module(f"cacheblend_cli.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            command: Any = typer.main.get_group(found)
        else:
            own = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
            own.command(cmd_name, cls=Command)(found)
            command = typer.main.get_command(own)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises UsageError for an unknown command, with the new name of a renamed one or the most similar name."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            hint = did_you_mean(name, COMMANDS, "cacheblend --help")
            if name in RENAMED:
                hint = f"it is now: cacheblend {RENAMED[name]}"
            elif name in _MEANT:
                hint = f"did you mean {_MEANT[name]}? see: cacheblend --help"
            raise UsageError(f"no such command: {name}", hint)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="cacheblend",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Answer questions over documents with a local model. The KV cache of every document chunk is computed once, "
    "stored on disk, and reused in any order.\n\nStart with: cacheblend precompute FOLDER, then cacheblend ask QUESTION.",
)


def _version(value: bool) -> None:
    if value:
        print(f"cacheblend {cacheblend_cli.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass
