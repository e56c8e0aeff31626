"""How a command's help is laid out: everyday flags first, then those of a panel together, research last."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

PANELS = ("Finding chunks", "The answer", "The prompt", "This machine and the store", "Blending, for research")
_COLUMN = 26  # of a flag; where it is longer its help begins on the next line
_KINDS = {"<str>": "TEXT", "<int>": "N", "<int range>": "N", "<float>": "X", "<float range>": "X", "<path>": "PATH"}
_DEFAULT = re.compile(r"\s*\[default: \(?(.*?)\)?\]$")


class Command(TyperCommand):
    """A command whose options are shown by panel (`rich_help_panel`), in the order of PANELS."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments: list[tuple[str, str]] = []
        everyday: list[tuple[str, str]] = []
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in PANELS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(record)
            else:
                panel = getattr(parameter, "rich_help_panel", None)
                panels.get(panel or "", everyday).append(_short(record))
        for title, records in (("Arguments", arguments), ("Options", everyday), *panels.items()):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=_COLUMN, col_spacing=2)


def _short(record: tuple[str, str]) -> tuple[str, str]:
    flag, text = record
    for long, short in _KINDS.items():
        flag = flag.replace(long, short)
    return flag, _DEFAULT.sub(r" [\1]", text)
