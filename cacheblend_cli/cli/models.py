"""cacheblend models: what is on disk, what a model is, and whether it computes here what it should."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_cli import user_cache
from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.sizes import format_size
from cacheblend_cli.errors import CacheBlendError, ExitCode, NotFoundError
from cacheblend_cli.settings import Settings

if TYPE_CHECKING:
    from cacheblend_cli.model.spec import ModelSpec

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, describe and check models.")
Model = Annotated[
    str,
    typer.Argument(help="Directory, .gguf file, hub id, smollm2 or handbook.", autocompletion=completion.models),
]


@app.command("ls")
def ls(
    folder: Annotated[Path, typer.Argument(help="Where to look beside the hub's cache.")] = Path("."),
    json: options.Json = False,
) -> None:
    """List the models on this machine: smollm2, handbook, the hub's cache, and GGUF files and checkpoints in a folder."""
    from cacheblend_cli.model.on_disk import kind_of, models_on_disk

    output = Output()
    if not folder.is_dir():
        raise NotFoundError(f"no such folder: {folder}", "name the one that the models are in")
    found = [(name, _size(path), kind_of(path)) for name, path in models_on_disk(folder)]
    if json:
        for name, size, kind in found:
            output.json({"model": name, "kind": kind, "bytes": size})
    else:
        output.table(("model", "kind", "size"), [(n, k, format_size(s)) for n, s, k in found], right=(2,), ends=(0,))


@app.command("pull")
def pull(
    model: Annotated[str, typer.Argument(help="ID, ID:FILE.gguf, or either with @REVISION behind ID.")],
    revision: Annotated[str | None, typer.Option(help="A branch, a tag or a commit.")] = None,
    json: options.Json = False,
    quiet: options.NoMessages = False,
) -> None:
    """Fetch a model from the Hugging Face hub into its cache: the files that are read, and no others.

    Prints where it is. Run again after an interruption, it fetches what is missing. --model takes the name that was pulled.
    """
    from huggingface_hub.utils import disable_progress_bars

    from cacheblend_cli.model.hub import HubName, fetch

    output = Output(quiet=quiet)
    if quiet or not output.animated:
        disable_progress_bars()
    name = HubName.parse(model).at(revision)
    output.note(f"fetching {name.text}")
    path = fetch(name)
    size = _size(path)
    if json:
        output.json({"model": name.text, "path": str(path), "bytes": size})
    else:
        output.line(str(path))
        output.note(f"{format_size(size)}; --model {name.text} uses it")


@app.command("show")
@options.with_settings("lora")
def show(settings: Settings, model: Model, json: options.Json = False) -> None:
    """Say what a model is: family, layers, KV of a token, context, dtype. What is missing or not implemented is named."""
    output = Output()
    facts = _facts(model, output, settings.lora)
    if json:
        output.json(facts)
        return
    for name, value in facts.items():
        shown = format_size(value) if name.endswith("bytes") or "_bytes_" in name else value
        output.text(f"{'size' if name == 'bytes' else name.replace('_', ' ').replace('bytes ', ''):<18}{shown}")


@app.command("check")
@options.with_settings("device", "dtype", "threads", "lora")
def check(settings: Settings, model: Model, json: options.Json = False) -> None:
    """Check that a model computes what it should: full prefill, blending that recomputes everything, and transformers agree.
    And find the --ratio that blending needs.

    Blending is safe at a ratio whose mean KL to full prefill is at most 0.06 nats a token over 12 prompts of four handbook pages,
    each collected alone. The result is remembered: ask says so when it blends at a smaller ratio.
    Computes in float32 unless --dtype is given. Exits with 1 on a mismatch. transformers is compared for checkpoints only: it
    turns a GGUF file into the same tensors, in several times the memory. It gets quantised weights as they were read here.
    """
    from cacheblend_cli.evaluation.check_model import check_model
    from cacheblend_cli.model.model_files import is_converted
    from cacheblend_cli.model.text_check import text_check

    output = Output()
    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    engine = options.load_engine(replace(settings, model=model, dtype=dtype), output)
    documents = text_check(engine.model.tokenizer)
    found = check_model(engine, with_transformers=not is_converted(engine.model.path))
    if json:
        facts = {"passed": found.passed, "documents": documents, "verdict": str(found.verdict)}
        output.json({"model": model, **asdict(found), **facts})
    else:
        output.text(f"{model}: a prompt of {found.prompt_tokens} tokens, {dtype}; largest differences of logits")
        output.text(f"  full prefill, blended with ratio 1   {found.blended:.2g}")
        if found.transformers is not None:
            output.text(f"  full prefill, transformers           {found.transformers:.2g}")
        output.text(f"{'right' if found.passed else 'WRONG'}: rounding explains up to {found.limit:.2g}")
        for b in found.blends:
            output.text(
                f"  blended at ratio {b.ratio:g}: KL {b.kl:.2g} nats a token, {b.top1:.0%} of tokens agree, "
                f"{b.same_answers} of {b.answers} answers are the same"
            )
        output.text(f"documents: {documents}")
        output.text(str(found.verdict))
    if not found.passed:
        raise typer.Exit(ExitCode.INTERNAL)


@app.command("clear")
def clear(json: options.Json = False) -> None:
    """Remove the cached packed weights (setting weights_cache_gb). The models stay."""

    output, folder = Output(), user_cache.folder(user_cache.PACKED_WEIGHTS)
    files = list(folder.iterdir()) if folder.is_dir() else []
    size = sum(file.stat().st_size for file in files)
    for file in files:
        file.unlink(missing_ok=True)
    if json:
        output.json({"removed": len(files), "bytes": size})
    else:
        output.text(f"{format_size(size)} of packed weights removed from {folder}")


def _facts(model: str, output: Output, lora: str) -> dict[str, Any]:
    """Raises what loading the model would raise, but for what the weights themselves say."""
    from cacheblend_cli.model.checkpoint import quantisation_of
    from cacheblend_cli.model.families import read_spec
    from cacheblend_cli.model.generic import GENERIC_PATH
    from cacheblend_cli.model.loading import resolve_model
    from cacheblend_cli.model.model_files import checkpoint_files
    from cacheblend_cli.model.text_check import text_check
    from cacheblend_cli.model.tokenizer import Tokenizer

    path = resolve_model(model, output.note)
    spec, files = read_spec(path), checkpoint_files(path)
    stated = str(spec.config.get("dtype") or spec.config.get("torch_dtype") or "not stated")
    try:
        tokenizer = Tokenizer(path, spec.vocab_size)
        missing = "nothing" if tokenizer.has_template else "a chat template: prompts are plain text"
        documents = text_check(tokenizer)
    except CacheBlendError as error:
        missing, documents = error.message, "not known"
    return {
        "model": model,
        "family": spec.config.get("model_type"),
        "architecture": spec.architecture,
        **({"computed_by": GENERIC_PATH} if spec.generic else {}),
        "files": ", ".join(file.name for file in files),
        "bytes": sum(file.stat().st_size for file in files),
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "heads": _heads(spec),
        "context": spec.max_context,
        "dtype": stated,
        **({"quantised": quantisation.method} if (quantisation := quantisation_of(path)) else {}),
        "kv_bytes_per_token": int(spec.kv_bytes_per_token(4 if stated == "float32" else 2)),
        **(_adapter(spec, Path(lora).expanduser()) if lora else {}),
        "documents": documents,
        "missing": missing,
    }


def _heads(spec: ModelSpec) -> str:
    if (latent := spec.latent) is not None:
        return (
            f"{spec.num_heads} for queries; of K and V a latent of {latent.rank} and a position key of {spec.head_dim}"
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
