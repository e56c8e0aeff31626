"""cacheblend init: choose a model for this machine and write it to cacheblend.toml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typer import Option

from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.config import read_document, write_text
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import format_size
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.named import SMOLLM2
from cacheblend_cli.settings.sources import FILE

if TYPE_CHECKING:
    from cacheblend_cli.model.recommend import Candidate


_YES_NO = ("no", "yes")


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

    Looks at memory, cores and GPU. Only a model that is on this machine is written: the best one, with the command to
    download the recommended model. Other settings in the file stay.
    """
    from tomlkit import dumps

    from cacheblend_cli.model.locate import check_on_disk, is_complete
    from cacheblend_cli.model.recommend import CANDIDATES, best_of, detect, fit, recommend

    output, machine = Output(json=json, quiet=quiet), detect()
    here, best, missing = [c for c in CANDIDATES if is_complete(c.name)], recommend(machine), None
    if model is not None:
        check_on_disk(model)
    else:
        missing = None if best in here else best
        model = getattr(best_of(here, machine), "name", None)
    file, write = Path.cwd() / FILE, model is not None and not dry_run
    document = read_document(file)
    if write:
        if document.get("model") not in (None, model) and not force:
            raise UsageError(f"{file} already sets model to {document['model']}", "replace it: cacheblend init --force")
        document["model"] = model
        write_text(file, dumps(document))
    if json:
        candidates = [{**vars(c), "here": fit(c, machine), "on_disk": c in here} for c in CANDIDATES]
        record = {"machine": vars(machine), "model": model, "recommended": best.name, "get": missing and missing.get}
        output.json({**record, "candidates": candidates})
        return
    gpu = f"a GPU of {format_size(machine.gpu_bytes)}" if machine.gpu_bytes else "no GPU"
    output.note(f"this machine: {format_size(machine.memory_bytes)} of memory, {machine.cores} cores, {gpu}")
    rows = [
        ("*" * (c == best), c.name, format_size(c.weight_bytes), c.license, fit(c, machine), _YES_NO[c in here])
        for c in CANDIDATES
    ]
    output.table(("", "model", "weights", "license", "here", "on disk"), rows, right=(2,))
    if write:
        output.note(f"wrote model = {model!r} to {file}")
    _show_next(model, missing, output, has_smollm2=CANDIDATES[0] in here)


def _show_next(model: str | None, missing: Candidate | None, output: Output, *, has_smollm2: bool) -> None:
    if model is None:
        fallback = f"; until then {SMOLLM2} is used, a model for trying" if has_smollm2 else ""
        output.note(f"wrote nothing: none of these that suits this machine is on disk{fallback}")
    if missing is not None:
        again = "cacheblend init --force" if model else "cacheblend init"
        output.note(f"recommended: {missing.name}, which is not on this machine; download it, then run {again}:")
        output.note(f"  {missing.get}")
    if model is not None:
        output.note("then:     cacheblend precompute FOLDER && cacheblend ask QUESTION")
        output.note(
            f"later:    cacheblend models check {model} --ratio-only   (after precompute: measures the --ratio it needs)"
        )
