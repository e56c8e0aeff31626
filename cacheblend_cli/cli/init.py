"""cacheblend init: choose a model for this machine and write it to cacheblend.toml."""

from __future__ import annotations

from typer import Option

from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.config import read_document, settings_file, write_text
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import format_size
from cacheblend_cli.errors import UsageError


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

    Looks at memory, cores and GPU, and prints the command that downloads the model. Other settings in the file stay.
    """
    from tomlkit import dumps

    from cacheblend_cli.model.recommend import CANDIDATES, detect, fit, recommend

    output, machine = Output(quiet=quiet), detect()
    chosen = recommend(machine)
    name = model or chosen.name
    file = settings_file(new=True)
    document = read_document(file)
    if "model" in document and document["model"] != name and not (force or dry_run):
        raise UsageError(f"{file} already sets model to {document['model']}", "replace it: cacheblend init --force")
    if not dry_run:
        document["model"] = name
        write_text(file, dumps(document))
    get = next((c.get for c in CANDIDATES if c.name == name), None)
    if json:
        candidates = [{**vars(c), "here": fit(c, machine)} for c in CANDIDATES]
        output.json({"machine": vars(machine), "model": name, "get": get, "candidates": candidates})
        return
    gpu = f"a GPU of {format_size(machine.gpu_bytes)}" if machine.gpu_bytes else "no GPU"
    output.note(f"this machine: {format_size(machine.memory_bytes)} of memory, {machine.cores} cores, {gpu}")
    rows = [
        ("*" if c.name == name else "", c.name, format_size(c.weight_bytes), c.license, fit(c, machine))
        for c in CANDIDATES
    ]
    output.table(("", "model", "weights", "license", "here"), rows, right=(2,))
    if not dry_run:
        output.note(f"wrote model = {name!r} to {file}")
    if get:
        output.note(f"download: {get}")
    output.note("then:     cacheblend precompute FOLDER && cacheblend ask QUESTION")
    output.note(
        f"later:    cacheblend models check {name} --ratio-only   (after precompute: measures the --ratio it needs)"
    )
