"""Flags of commands: settings that are flags, their layout in --help, and what to use instead of other flags.

--help shows common options; --help-all shows all of them, by panel.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperOption

from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import GROUPS, Settings, grouped
from cacheblend_cli.settings.fields import REMOVED
from cacheblend_cli.settings.identity import IDENTITY

_COMMON = (
    "top_k", "search", "on_weak_match", "on_unsupported", "mode", "ratio", "max_tokens", "reasoning_tokens", "temperature", "top_p",
    *IDENTITY, "salt", "store",
)  # fmt: skip
ASK = ("top_k", "collection", "expand", *_COMMON, "selector", "seed")
"""Flags of `ask` and `chat`: what changes from one question to the next."""
_ENGINE = (*grouped("machine", "decoding", "memory", but=IDENTITY), *GROUPS["tier"], "embeddings", "lock_timeout")
SERVE = ("chunk_tokens", *_COMMON, *_ENGINE, *GROUPS["serve"])
_HOMES = (
    ("serve", _ENGINE),
    ("eval", GROUPS["research"]),
    ("precompute", ("context", "max_size", *GROUPS["cutting"])),
    ("ask", ASK),
    ("", tuple(vars(Settings()))),
)
"""(command, settings that are its flags); the first one with a setting counts."""
_REMOVED = {
    "--ray": "use --collector ray:ADDRESS (docs/extending.md)",
    "--decode-url": "use --decoder vllm:URL (docs/extending.md)",
    "--decode-key": "use the variable VLLM_API_KEY (docs/extending.md)",
    "--hand-over": "use --decoder vllm:URL,DIRECTORY (docs/extending.md)",
    "--revision": "use ID@REVISION",
    "--recheck": "chunks verify checks every stored byte; cacheblend precompute --force computes KV again",
    **{f"--{name.replace('_', '-')}": instead for name, instead in REMOVED.items()},
}
PANELS = (
    "Finding chunks", "Reading documents", "The answer", "The prompt", "This machine and the store", "Blending, for research",
)  # fmt: skip
"""Panels (`rich_help_panel`) in display order. Only --help-all shows the options in them."""
HELP_ALL = "cacheblend.help_all"
"""Key of a context's `meta` that makes its help show the panels."""
_CONFIRM_MARKED = ("--confirm\0marked", "--confirm=marked")
"""Forms of --on-unsupported confirm. Typer has no options with an optional value, and a question may follow."""
_COLUMN = 26  # width of the flags; the help of a longer one starts on the next line
_KINDS = {"<str>": "TEXT", "<int>": "N", "<int range>": "N", "<float>": "X", "<float range>": "X", "<path>": "PATH"}


class Command(TyperCommand):
    """A command whose --help shows the options without a panel, and whose --help-all shows all."""

    def get_params(self, ctx: Any) -> list[Any]:
        found = super().get_params(ctx)
        if any(_panel(parameter) for parameter in found):
            found.append(
                TyperOption(
                    param_decls=["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_all,
                    help="Show every option.",
                )
            )
        return found

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        text = "\0".join(("", *args[:end], ""))
        if any("--confirm" in parameter.opts for parameter in self.params):
            for marked in _CONFIRM_MARKED:
                text = text.replace(f"\0{marked}\0", "\0--on-unsupported\0confirm\0")
        return super().parse_args(ctx, [*text.split("\0")[1:-1], *args[end:]])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", "Options", *PANELS)}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                is_argument = parameter.param_type_name == "argument"
                sections["Arguments" if is_argument else _panel(parameter) or "Options"].append(
                    _short(parameter, record)
                )
        for name, records in sections.items():
            if records and (name not in PANELS or ctx.meta.get(HELP_ALL)):
                with formatter.section(name):
                    formatter.write_dl(records, col_max=_COLUMN, col_spacing=2)


def _show_all(ctx: Any, parameter: Any, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        print(ctx.get_help())
        ctx.exit()


def _panel(parameter: Any) -> str | None:
    return getattr(parameter, "rich_help_panel", None)


def _short(parameter: Any, record: tuple[str, str]) -> tuple[str, str]:
    flag, text = record
    for long, short in _KINDS.items():
        flag = flag.replace(long, short)
    if isinstance(default := parameter.show_default, str):
        text = text.replace(f"({default})", default)
    return flag, text.replace("  [default: ", " [")


def instead_of(flag: str) -> UsageError | None:
    """Return an error that says what to use instead of a flag of earlier versions, or where to set a setting that is
    not a flag of this command; None for other flags."""
    if flag in _REMOVED:
        return UsageError(f"{flag} was removed", _REMOVED[flag])
    name = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
    command = next((command for command, names in _HOMES if name in names), None)
    is_switch, is_off = isinstance(getattr(Settings(), name, None), bool), flag.startswith("--no-")
    if command is None or (is_off and not is_switch):
        return None
    value, argument = (str(not is_off).lower(), "") if is_switch else ("VALUE", " VALUE")
    other = f", or cacheblend {command} {flag}{argument}" if command else ""
    return UsageError(
        f"{flag} is a setting, not a flag of this command", f"cacheblend config set {name} {value}{other}"
    )
