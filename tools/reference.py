"""Write the generated pages of docs/: `python -m tools.reference`, `--check` to compare.

From --help: reference.md and the manual page. From settings/fields.py: settings.md. From the types of an answer:
json.md and ask.schema.json.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cacheblend_cli.cli.flags import HELP_ALL
from cacheblend_cli.errors import ExitCode
from tools import answer_json, settings_page
from tools.wrap import wrapped

DOCS = Path(__file__).parent.parent / "docs"
_COLUMNS = "100"
_TITLE = """# Reference

Exit codes, and what `--help` says of each command, written by `python -m tools.reference`.
"""
_EXIT_CODES = {
    ExitCode.OK: "done, or a confirmation was declined",
    ExitCode.INTERNAL: "internal error; the message names a log",
    ExitCode.USAGE: "wrong usage or input, or a result that cannot be written",
    ExitCode.NOT_FOUND: "a file, model, chunk or match was not found, or the answer was refused",
    ExitCode.STORE: "the store cannot be used, or holds damaged data",
    ExitCode.DEVICE: "no such device, not enough memory, or a full queue",
    ExitCode.CHANGED: "the answer was printed, and --confirm changed it",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}


def helps() -> Iterator[tuple[str, str]]:
    """Return (name, help) of the tool and of each command, in order."""
    for name, context in commands():
        context.meta[HELP_ALL] = True
        yield name, context.command.get_help(context).rstrip()


def commands() -> Iterator[tuple[str, Any]]:
    """Return (name, context) of the tool and of each command, in order."""
    os.environ["COLUMNS"] = _COLUMNS
    import typer

    from cacheblend_cli.cli.app import app

    yield from _of(typer.main.get_command(app), "cacheblend", None)


def _of(command: Any, name: str, parent: Any) -> Iterator[tuple[str, Any]]:
    # leave out what differs by machine, such as the current shell
    with command.make_context(name.split()[-1], [], parent=parent, resilient_parsing=True) as context:
        yield name, context
        for below in command.list_commands(context) if hasattr(command, "list_commands") else ():
            part = command.get_command(context, below)
            if not part.hidden:
                yield from _of(part, f"{name} {below}", context)


def reference() -> str:
    parts = [f"## {name}\n\n{_indented(text)}\n" for name, text in helps()]
    codes = "\n".join(f"| {code.value} | {_EXIT_CODES[code]} |" for code in ExitCode)
    return "\n".join((_TITLE, f"## Exit codes\n\n| code | |\n|---|---|\n{codes}\n", *parts))


def manual() -> str:
    """Return roff with every command's help under its name."""
    parts = []
    for name, text in helps():
        body = text.replace("\\", "\\e").replace("-", "\\-")
        lines = [("\\&" + line) if line.startswith((".", "'")) else line for line in body.splitlines()]
        parts.append("\n".join((f'.SH "{name.upper()}"', ".nf", *lines, ".fi")))
    head = ".TH CACHEBLEND 1\n.SH NAME\ncacheblend \\- ask over documents whose KV cache is computed once\n"
    codes = "\n".join(f"{code.value:>3}  {_EXIT_CODES[code]}".replace("-", "\\-") for code in ExitCode)
    return head + "\n".join((*parts, f'.SH "EXIT STATUS"\n.nf\n{codes}\n.fi')) + "\n"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def main() -> None:
    flags = {
        name.partition(" ")[2]: {p.name for p in context.command.params if not getattr(p, "hidden", False)}
        for name, context in commands()
    }
    pages = {
        "reference.md": reference(), "cacheblend.1": manual(), "settings.md": wrapped(settings_page.page(flags)),
        "json.md": wrapped(answer_json.page()), "ask.schema.json": answer_json.schema_file(),
    }  # fmt: skip
    for path, text in ((DOCS / name, text) for name, text in pages.items()):
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.name} is out of date: python -m tools.reference")


if __name__ == "__main__":
    main()
