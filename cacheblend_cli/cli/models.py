"""cacheblend models: list, download, describe and check models, and measure the ratio they need."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cacheblend_store
import typer
from typer import Argument, Option

from cacheblend_cli import user_cache
from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.exits import on_interrupt
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import open_store
from cacheblend_cli.cli.units import format_size, with_kv_line
from cacheblend_cli.errors import CacheBlendError, ExitCode, NotFoundError
from cacheblend_cli.settings import Resolved, Settings, grouped, resolve
from cacheblend_cli.types import NO_RATIO, NUM_HITS, AskRequest, SearchParams

if TYPE_CHECKING:
    from cacheblend_cli.engine.engine import Engine
    from cacheblend_cli.engine.profile import Profile
    from cacheblend_cli.model.spec import ModelSpec

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, describe and check models.")
Model = Annotated[
    str,
    Argument(
        help="Directory, .gguf file, hub id (ID or ID:QUANT), smollm2 or handbook.", autocompletion=completion.models
    ),
]


@app.command("ls")
def ls(
    folder: Path = Argument(Path("."), help="Directory to search besides the hub's cache."), json: options.Json = False
) -> None:
    """List the models on this machine.

    Lists smollm2, handbook, models in the hub's cache, and GGUF files and checkpoints in a folder. The default is the
    model used without --model.
    """
    from cacheblend_cli.model.locate import find_local
    from cacheblend_cli.model.named import NOTES, SMOLLM2
    from cacheblend_cli.model.on_disk import kind_of, models_on_disk

    output, default = Output(json=json), resolve({}).settings.model or SMOLLM2
    if not folder.is_dir():
        raise NotFoundError(f"no such folder: {folder}", "name the folder with the models")
    used = None
    with suppress(CacheBlendError):
        used = find_local(default)
    found = [(name, path, _size(path), kind_of(path)) for name, path in models_on_disk(folder)]
    rows = []
    for name, path, size, kind in found:
        is_default = name == default or (used is not None and os.path.realpath(path) == os.path.realpath(used))
        output.json({"model": name, "kind": kind, "bytes": size, "default": is_default})
        note = "; ".join(part for part in ("the default" if is_default else "", NOTES.get(name, "")) if part)
        rows.append((name, kind, format_size(size), note))
    output.table(("model", "kind", "size", ""), rows, right=(2,), ends=(0,))


@app.command("pull")
def pull(
    model: str = Argument(help="ID, ID:QUANT or ID:FILE.gguf; @REVISION (a branch, a tag or a commit) may follow ID."),
    json: options.Json = False,
    quiet: options.NoMessages = False,
) -> None:
    """Download a model from the Hugging Face hub.

    Downloads only the needed files into the hub's cache, compares them with the hub's SHA-256, and prints the path. Run
    it again to continue after an interruption. --model takes the same name.

    Of a repository of GGUF files, one is taken: that of QUANT, such as Q8_0, else Q4_K_M if there is one.
    """
    from huggingface_hub.utils import disable_progress_bars

    from cacheblend_cli.model.hub import HubName, fetch

    output = Output(json=json, quiet=quiet)
    if quiet or not output.animated:
        disable_progress_bars()
    name = HubName.parse(model)
    output.note(f"downloading {name.text}")
    with on_interrupt("what was fetched is kept: run it again to continue"):
        path = fetch(name)
    size = _size(path)
    output.result({"model": name.text, "path": str(path), "bytes": size}, str(path))
    if not json:
        output.note(
            f"{format_size(size)}; use it: --model {name.text}, or cacheblend config set model {name.text} --user"
        )


@app.command("show")
@options.with_settings("lora")
def show(settings: Settings, model: Model, json: options.Json = False) -> None:
    """Describe a model.

    Shows family, layers, KV per token, context, dtype, and missing or unsupported features.
    """
    output = Output(json=json)
    facts = _facts(model, output, settings)
    output.json(facts)
    for name, value in with_kv_line(facts).items():
        shown = format_size(value) if name.endswith("bytes") or "_bytes_" in name else value
        output.text(f"{'size' if name == 'bytes' else name.replace('_', ' ').replace('bytes ', ''):<18}{shown}")


@app.command("check")
@options.with_settings(
    "store",
    *grouped("model", but=["model"]),
    "device",
    "dtype",
    "threads",
    *grouped("prompt"),
    "kv_dtype",
    "salt",
    *grouped("check"),
)
def check(
    resolved: Resolved,
    model: Model,
    ratio_only: bool = Option(False, "--ratio-only", help="Only measure the ratio."),
    questions: Path | None = Option(
        None, help="Measure with these questions (JSON lines, see eval) instead of general ones."
    ),
    json: options.Json = False,
    quiet: options.NoMessages = False,
) -> None:
    """Check a model, and measure the --ratio it needs.

    First, full prefill, blending at ratio 1 and transformers must agree. This computes in float32 unless --dtype is
    given, and exits with 1 on a mismatch. transformers is compared only for checkpoints, not for GGUF files, and gets
    quantised weights as they were read here.

    Then blending is compared with full prefill on stored chunks at rising ratios, with and without a correction, with
    general questions or your --questions. The smallest ratio within --kl-mean, by a margin, is stored for
    this model, dtype, KV codec and prompt; --ratio model, the default, uses it.
    """
    from cacheblend_cli.evaluation.samples import read_samples

    output, settings = Output(json=json, quiet=quiet), replace(resolved.settings, model=model)
    resolved = replace(resolved, settings=settings)
    asked = [sample.question for sample in read_samples(questions)] if questions is not None else []
    options.engine_config(settings)  # raise errors before torch is imported
    from cacheblend_cli.engine.profile import keep_profile

    record: dict[str, Any] = {"model": model}
    if not ratio_only:
        record |= _check_numbers(settings, output)
        if not record["passed"]:
            output.json(record)
            raise typer.Exit(ExitCode.INTERNAL)
    engine = options.load_engine(settings, output)
    try:
        profile = _measured_profile(engine, resolved, asked, output)
    except NotFoundError as error:
        if ratio_only:
            raise
        output.warn(f"the ratio was not measured: {error.message}; {error.hint}")
        record["profile"] = None
    else:
        keep_profile(engine.model, profile)
        record["profile"] = {**asdict(profile), "ratio": profile.choice and profile.choice.ratio}
        for d in profile.measured:
            output.text(
                f"  ratio {d.ratio:<4g} {d.correction:<10}  KL mean {d.mean:.3g} ± {d.error:.2g}, 90th percentile {d.p90:.3g}"
            )
        output.text(f"ratio: {profile}")
    output.json(record)


def _check_numbers(settings: Settings, output: Output) -> dict[str, Any]:
    from cacheblend_cli.evaluation.check_model import check_model
    from cacheblend_cli.model.model_files import is_converted

    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    engine = options.load_engine(replace(settings, dtype=dtype), output)
    found = check_model(engine, with_transformers=not is_converted(engine.model.path))
    output.text(f"{settings.model}: a prompt of {found.prompt_tokens} tokens, {dtype}; largest differences of logits")
    output.text(f"  full prefill, blended with ratio 1   {found.blended:.2g}")
    if found.transformers is not None:
        output.text(f"  full prefill, transformers           {found.transformers:.2g}")
    output.text(f"{'passed' if found.passed else 'FAILED'}: rounding explains up to {found.limit:.2g}")
    return {**asdict(found), "passed": found.passed}


def _measured_profile(engine: Engine, resolved: Resolved, questions: list[str], output: Output) -> Profile:
    """Measure the ratio on the store's chunks. Raises NotFoundError without a store or with too few prompts."""
    from cacheblend_cli.evaluation.profile import measure_profile

    settings = resolved.settings
    ask = AskRequest.of(
        resolved,
        "",
        search=SearchParams.of(replace(settings, on_weak_match="answer", top_k=settings.top_k or NUM_HITS)),
    )
    ask = replace(ask, blend=replace(ask.blend, mode="blend"))
    try:
        store = open_store(settings, write=False)
    except cacheblend_store.StoreNotFound as error:
        raise NotFoundError(error.message, "store documents first: cacheblend precompute FOLDER") from error
    with store, on_interrupt("the ratio was not stored"), output.progress("ratio") as bar:
        return measure_profile(engine, store, ask, settings.kl_mean, questions, say=output.note, on_progress=bar)


@app.command("clear")
def clear(json: options.Json = False) -> None:
    """Remove cached weights: packed, or quantised by --weight-dtype. Models stay."""
    folders = [user_cache.folder(kind) for kind in (user_cache.PACKED_WEIGHTS, user_cache.QUANTISED)]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    facts = {"removed": len(files), "bytes": size}
    Output(json=json).result(facts, f"removed {format_size(size)} of weights from {folders[0].parent}")


def _facts(model: str, output: Output, settings: Settings) -> dict[str, Any]:
    """Describe the model without reading its weights. Raises errors of loading it."""
    from cacheblend_cli.model.locate import locate

    found = locate(model)  # before torch is imported
    import torch

    from cacheblend_cli.model.description import DTYPES
    from cacheblend_cli.model.families import read_spec
    from cacheblend_cli.model.families.quantisation import quantisation_of
    from cacheblend_cli.model.generic import GENERIC_PATH
    from cacheblend_cli.model.locate import resolve_model
    from cacheblend_cli.model.model_files import checkpoint_files
    from cacheblend_cli.model.tokenizer import Tokenizer
    from cacheblend_cli.prompt.collection import kv_facts

    path = resolve_model(model, output.note)
    spec, files = read_spec(path), checkpoint_files(path)
    stated = str(spec.config.get("dtype") or spec.config.get("torch_dtype") or "not stated")
    dtype = getattr(torch, name) if (name := stated.removeprefix("torch.")) in DTYPES else torch.bfloat16
    try:
        tokenizer = Tokenizer(path, spec.vocab_size)
        missing = "nothing" if tokenizer.has_template else "a chat template: prompts are plain text"
    except CacheBlendError as error:
        missing = error.message
    return {
        "model": model,
        "family": spec.config.get("model_type"),
        "architecture": spec.architecture,
        **({"computed_by": GENERIC_PATH} if spec.generic else {}),
        "files": found.name if found.is_file() else ", ".join(file.name for file in files),
        "bytes": sum(file.stat().st_size for file in files),
        "layers": spec.num_layers + sum(spec.recurrent),
        **({"recurrent_layers": sum(spec.recurrent)} if spec.recurrent else {}),
        "hidden_size": spec.hidden_size,
        "heads": _heads(spec),
        "context": spec.max_context,
        "dtype": stated,
        **({"quantised": quantisation.method} if (quantisation := quantisation_of(path)) else {}),
        **kv_facts(spec, settings.kv_dtype, dtype, spec.kv_bytes_per_token(dtype.itemsize)),
        **(_adapter(spec, Path(settings.lora).expanduser()) if settings.lora else {}),
        "ratio": _ratios(path, spec, settings),
        "missing": missing,
    }


def _ratios(path: Path, spec: ModelSpec, settings: Settings) -> str:
    if spec.recurrent:
        return NO_RATIO
    from cacheblend_cli.engine.profile import profile_file, read_profiles
    from cacheblend_cli.model.adapter import LoraAdapter
    from cacheblend_cli.model.description import model_fingerprint, weights_digest
    from cacheblend_cli.model.measured_ratios import MEASURED_RATIOS

    lora = LoraAdapter.read(Path(settings.lora).expanduser()).digest if settings.lora else ""
    fingerprint = model_fingerprint(spec, path, "float32", lora, settings.weight_dtype)
    found = [
        f"{p.choice.ratio if p.choice else 1:g} in {p.conditions['dtype']} with KV in {p.conditions['KV dtype']} ({p})"
        for p in read_profiles(profile_file(fingerprint))
    ]
    if not found and (measured := MEASURED_RATIOS.get(weights_digest(path))) and not lora:
        return f"{measured.ratio:g}, {measured}"
    return "; ".join(found) or "not measured: cacheblend models check, after precompute"


def _heads(spec: ModelSpec) -> str:
    if (latent := spec.latent) is not None:
        return (
            f"{spec.num_heads} for queries; K and V are a latent of {latent.rank} and a position key of {spec.head_dim}"
        )
    each = dict.fromkeys(spec.heads_of(layer) for layer in range(spec.num_kv_layers))
    return "; ".join(f"{spec.num_heads} for queries, {heads} for K and V, of {dim}" for heads, dim in each)


def _adapter(spec: ModelSpec, path: Path) -> dict[str, Any]:
    """Raises UsageError for an adapter that does not fit the model."""
    from cacheblend_cli.model.adapter import LoraAdapter
    from cacheblend_cli.model.weight_map import expected_shapes
    from cacheblend_cli.model.weights import deltas_of

    deltas = deltas_of(spec, LoraAdapter.read(path), expected_shapes(spec))
    ranks = sorted({delta.down.shape[0] for delta in deltas.values()})
    size = sum(delta.down.numel() + delta.up.numel() for delta in deltas.values()) * 4
    return {
        "adapter": str(path),
        "adapter_ranks": ", ".join(map(str, ranks)),
        "adapter_weights": len(deltas),
        "adapter_bytes": size,
    }


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [f for pattern in ("*.safetensors", "*.gguf") for f in path.glob(pattern)]
    return sum(file.stat().st_size for file in files)
