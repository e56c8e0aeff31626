"""cacheblend init: choose a model for this machine and write it to cacheblend.toml."""

from __future__ import annotations

from pathlib import Path

from typer import Option

from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.config import read_document, write_text
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import format_size
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.named import SMOLLM2
from cacheblend_cli.settings import FILE


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

    Looks at memory, cores and GPU. A model that is not on this machine is not written: the best one that is here is,
    and the command that downloads the recommended one is printed. Other settings in the file stay.
    """
    from tomlkit import dumps

    from cacheblend_cli.model.locate import check_on_disk, is_complete
    from cacheblend_cli.model.recommend import CANDIDATES, best_of, detect, fit, recommend

    output, machine = Output(quiet=quiet), detect()
    here = [c for c in CANDIDATES if is_complete(c.name)]
    best = recommend(machine)
    name, missing = model, None
    if model is not None:
        check_on_disk(model)
    else:
        chosen = best_of(here, machine)
        name, missing = None if chosen is None else chosen.name, None if best in here else best
    file = Path.cwd() / FILE
    document = read_document(file)
    old = document.get("model")
    if name and old not in (None, name) and not (force or dry_run):
        raise UsageError(f"{file} already sets model to {old}", "replace it: cacheblend init --force")
    if name and not dry_run:
        document["model"] = name
        write_text(file, dumps(document))
    if json:
        candidates = [{**vars(c), "here": fit(c, machine), "on_disk": c in here} for c in CANDIDATES]
        record = {"machine": vars(machine), "model": name, "recommended": best.name, "get": missing and missing.get}
        output.json({**record, "candidates": candidates})
        return
    gpu = f"a GPU of {format_size(machine.gpu_bytes)}" if machine.gpu_bytes else "no GPU"
    output.note(f"this machine: {format_size(machine.memory_bytes)} of memory, {machine.cores} cores, {gpu}")
    rows = [
        (
            "*" if c == best else "",
            c.name,
            format_size(c.weight_bytes),
            c.license,
            fit(c, machine),
            "yes" if c in here else "no",
        )
        for c in CANDIDATES
    ]
    output.table(("", "model", "weights", "license", "here", "on disk"), rows, right=(2,))
    if name and not dry_run:
        output.note(f"wrote model = {name!r} to {file}")
    elif not name:
        fallback = f"; until then {SMOLLM2} is used, a model for trying" if CANDIDATES[0] in here else ""
        output.note(f"wrote nothing: none of these that suits this machine is on disk{fallback}")
    if missing:
        again = "cacheblend init --force" if name else "cacheblend init"
        output.note(f"recommended: {missing.name}, which is not on this machine; download it, then run {again}:")
        output.note(f"  {missing.get}")
    if name:
        output.note("then:     cacheblend precompute FOLDER && cacheblend ask QUESTION")
        output.note(
            f"later:    cacheblend models check {name} --ratio-only   (after precompute: measures the --ratio it needs)"
        )
