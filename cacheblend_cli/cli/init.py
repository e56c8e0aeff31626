"""cacheblend init: choose a model that runs well here, download it, and make it the default of all commands."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.config import read_document, settings_file, write_setting
from cacheblend_cli.cli.exits import on_interrupt
from cacheblend_cli.cli.inputs import can_ask, choice
from cacheblend_cli.cli.output import Output, show_table
from cacheblend_cli.cli.units import format_size
from cacheblend_cli.errors import ModelNotFound
from cacheblend_cli.model.named import NOTES
from cacheblend_cli.settings import resolve

if TYPE_CHECKING:
    from cacheblend_cli.model.catalogue import CatalogueModel
    from cacheblend_cli.model.machine import Machine

_MOST_NAMED = 4


def init(
    model: str | None = Option(
        None,
        help="Use this model without a question: a name of the table, or any value of --model.",
        autocompletion=completion.models,
    ),
    yes: bool = Option(False, "--yes", "-y", help="Use the recommended model without a question."),
    dry_run: bool = Option(False, "--dry-run", help="Download and write nothing."),
    json: options.Json = False,
    quiet: options.NoMessages = False,
) -> None:
    """Choose a model for this machine, download it, and make it the default.

    Measures memory and the speed of decoding in about 3 s, and lists quantised models with size, licence, expected
    tokens a second and ratio (see ask --ratio). On a terminal it asks which one to use; elsewhere --yes or --model
    downloads one. The model becomes the default of all commands, in the user's settings.
    """
    from cacheblend_cli.model.catalogue import CATALOGUE, recommend

    output, record = Output(json=json, quiet=quiet), dict[str, Any]()
    if model is None:
        from cacheblend_cli.model.machine import detect

        output.status("measuring this machine")
        machine = detect()
        best = recommend(machine)
        record = _record(machine, best)
        _show(machine, best, output)
        is_asked = not (yes or dry_run or json or quiet) and can_ask(output)
        chosen = best.model if yes else _ask(best, output) if is_asked else None
        if not (yes or is_asked):
            output.note(
                f"to download {best.name} and make it the default: cacheblend init --yes; another: --model NAME"
            )
    else:
        chosen = next((m.model for m in CATALOGUE if m.name.lower() == model.lower()), model)
    file, written = settings_file(user=True), chosen is not None and not dry_run
    if chosen is not None and written:
        _make_default(chosen, file, output)
    elif chosen is not None:
        output.note(f"would make {chosen} the default of all commands, in {file}")
    output.json({"model": chosen, "file": str(file), "written": written, **record})


def _make_default(model: str, file: Path, output: Output) -> None:
    """Get the model and write it to the user's settings. Raises ModelNotFound, UsageError."""
    read_document(file)  # reports a damaged file before a long download
    _get(model, output)
    path = Path(model).expanduser()
    write_setting(file, "model", model if model in NOTES or not path.exists() else str(path.resolve()))
    output.note(f"default of all commands: {model}")
    resolved = resolve({}, lenient=True)
    if (origin := resolved.origin["model"]) != str(file):
        output.warn(f"here {origin} sets another model, which is used: {resolved.settings.model}")
    output.note("next: cacheblend precompute FOLDER && cacheblend ask QUESTION")


def _record(machine: Machine, best: CatalogueModel) -> dict[str, Any]:
    from cacheblend_cli.model.catalogue import CATALOGUE, tokens_per_s

    models = [
        {**vars(m), "tokens_per_s": tokens_per_s(m, machine), "ratio": m.measured_ratio and m.measured_ratio.ratio}
        for m in CATALOGUE
    ]
    return {"machine": vars(machine), "recommended": best.name, "models": models}


def _show(machine: Machine, best: CatalogueModel, output: Output) -> None:
    from cacheblend_cli.model.catalogue import CATALOGUE

    gpu = f"a GPU of {format_size(machine.gpu_bytes)}" if machine.gpu_bytes else "no GPU"
    output.note(f"this machine: {format_size(machine.memory_bytes)} of memory, {machine.cores} cores, {gpu}")
    rows = [(f"{i}{'*' * (m is best)}", *_row(m, machine)) for i, m in enumerate(CATALOGUE, 1)]
    show_table(("", "model", "size", "tokens/s", "ratio", "licence", ""), rows, output, left=2)


def _ask(best: CatalogueModel, output: Output) -> str | None:
    """Return the model that is chosen on the terminal, None for none."""
    from cacheblend_cli.model.catalogue import CATALOGUE

    number = choice("which one? (*: recommended, q: none)", len(CATALOGUE), CATALOGUE.index(best) + 1, output)
    return None if number is None else CATALOGUE[number - 1].model


def _row(model: CatalogueModel, machine: Machine) -> tuple[str, ...]:
    from cacheblend_cli.model.catalogue import fits, tokens_per_s
    from cacheblend_cli.model.locate import find_local

    speed, measured, is_here = tokens_per_s(model, machine), model.measured_ratio, False
    with suppress(ModelNotFound):
        is_here = find_local(model.model) is not None
    shown = "-" if speed is None else f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}"
    ratio = "default" if measured is None else f"{measured.ratio:g}"
    notes = (model.note, "here" if is_here else "", "" if fits(model, machine) else "too large")
    return model.name, format_size(model.num_bytes), shown, ratio, model.license, ", ".join(filter(None, notes))


def _get(model: str, output: Output) -> None:
    """Download the model unless it is here. Raises ModelNotFound, naming the models on this machine, and UsageError."""
    from cacheblend_cli.model.locate import check_on_disk, find_local

    if find_local(model) is not None:
        return check_on_disk(model)
    from huggingface_hub.utils import disable_progress_bars

    from cacheblend_cli.model.hub import HubName, fetch
    from cacheblend_cli.model.on_disk import models_on_disk

    if output.quiet or not output.animated:
        disable_progress_bars()
    output.note(f"downloading {model}")
    try:
        with on_interrupt("what was fetched is kept: run cacheblend init again to continue"):
            fetch(HubName.parse(model))
    except ModelNotFound as error:
        here = [name for name, _ in models_on_disk(Path())]
        names = ", ".join(here[:_MOST_NAMED]) + (", ..." if len(here) > _MOST_NAMED else "")
        use = f"models on this machine: {names}; use one: cacheblend init --model NAME"
        raise ModelNotFound(model, error.message, f"{error.hint}; {use}") from error
