"""cacheblend init: choose a model for this machine and write it to cacheblend.toml."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from typer import Option

from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.config import read_document, write_text
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import format_size
from cacheblend_cli.errors import ModelNotFound, UsageError
from cacheblend_cli.settings.sources import FILE


def init(
    model: str | None = Option(
        None, help="Use this model instead of the recommended one.", autocompletion=completion.models
    ),
    force: bool = Option(False, "--force", help="Replace the model of an existing cacheblend.toml."),
    dry_run: bool = Option(False, "--dry-run", help="Only recommend; write nothing."),
    json: options.Json = False,
    quiet: options.NoMessages = False,
) -> None:
    """Recommend a model that fits this machine and write it to ./cacheblend.toml.

    Looks at memory, cores and GPU. A model that is not on this machine is not written: the command to download it is
    shown. Other settings in the file stay.
    """
    from tomlkit import dumps

    from cacheblend_cli.model.locate import check_on_disk
    from cacheblend_cli.model.recommend import CANDIDATES, detect, recommend

    output, machine = Output(json=json, quiet=quiet), detect()
    best = recommend(machine)
    if model is not None:
        check_on_disk(model)
    else:
        with suppress(ModelNotFound, UsageError):
            check_on_disk(best.name)
            model = best.name
    file, write = Path.cwd() / FILE, model is not None and not dry_run
    document = read_document(file)
    if write:
        if document.get("model") not in (None, model) and not force:
            raise UsageError(f"{file} already sets model to {document['model']}", "replace it: cacheblend init --force")
        document["model"] = model
        write_text(file, dumps(document))
    if json:
        record = {"machine": vars(machine), "model": model, "recommended": best.name, "get": best.get}
        output.json({**record, "candidates": [vars(c) for c in CANDIDATES]})
        return
    gpu = f"a GPU of {format_size(machine.gpu_bytes)}" if machine.gpu_bytes else "no GPU"
    output.note(f"this machine: {format_size(machine.memory_bytes)} of memory, {machine.cores} cores, {gpu}")
    rows = [("*" * (c == best), c.name, format_size(c.weight_bytes)) for c in CANDIDATES]
    output.table(("", "model", "weights"), rows, right=(2,))
    if model is None:
        output.note(f"wrote nothing: {best.name} is not on this machine; download it, then run cacheblend init again:")
        output.note(f"  {best.get}")
        return
    if write:
        output.note(f"wrote model = {model!r} to {file}")
    output.note("then:     cacheblend precompute FOLDER && cacheblend ask QUESTION")
    output.note(f"later:    cacheblend models check {model} --ratio-only   (after precompute: measures its --ratio)")
