"""Loading a model: a local directory, a GGUF file or a hub id; its dtype and fingerprint."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from cacheblend_kernels import BACKENDS, KernelBackend, KernelError, compiled, select_backend

from cacheblend_cli.errors import DeviceError, UsageError, check_known
from cacheblend_cli.model.checkpoint import quantisation_of, tensor_source
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.device import check_room, make_current
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.families.reader import OTHER_FIELDS
from cacheblend_cli.model.host_memory import keep_freed_memory
from cacheblend_cli.model.linear import bound_caches
from cacheblend_cli.model.locate import locate
from cacheblend_cli.model.model_files import checkpoint_files, gguf_file_of, is_converted, read_object, weight_names
from cacheblend_cli.model.parallel import Shard
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.tensor_source import SafetensorsFiles, TensorSource
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.model.weights import check_tensors, load_weights, weights_digest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHT_DTYPES = ("auto", "int8", "int4")  # auto: as in the file; others: see `gguf_files.quantise.KINDS`
_ASKED, _ANSWERED, _NEXT = "5d1f0 asked", "5d1f1 answered", "5d1f2 next"
STORED_AS = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' names


@dataclass(frozen=True)
class LoadedModel:
    """A decoder with its tokenizer and metadata."""

    name: str
    path: Path
    decoder: Decoder
    tokenizer: Tokenizer
    fingerprint: str  # covers architecture, weights, RoPE, dtypes and adapter
    eos_ids: frozenset[int]
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # fingerprints of the same model by compute dtype
    identity: str = ""  # fingerprint of the same model in any dtype, without an adapter
    generation_config: Mapping[str, Any] = field(default_factory=dict)  # contents of the model's file, unchecked
    lora: Path | None = None  # the adapter merged into the weights
    lora_digest: str = ""  # digest of the adapter's content
    weight_dtype: str = "auto"
    files: Mapping[Path, os.stat_result] = field(default_factory=dict)  # files of the weights, as they were at loading

    @property
    def shown_path(self) -> Path:
        """Path to show to the user: the GGUF file if `path` is the directory that stands for it."""
        return gguf_file_of(self.path) if is_converted(self.path) else self.path

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    def check_files(self) -> None:
        """Raise UsageError if a file of the weights, which are used in place, was written to after loading. A file that
        was replaced by another one is used as it was."""
        for file, before in self.files.items() if self.decoder.device.type == "cpu" else ():
            with suppress(FileNotFoundError):
                now = file.stat()
                changed = (now.st_mtime_ns, now.st_size) != (before.st_mtime_ns, before.st_size)
                if changed and now.st_ino == before.st_ino:
                    raise UsageError(
                        f"{file} was changed while its weights were in use: what is computed now belongs to no model",
                        "run the command again; replace such a file by renaming a new one",
                    )


@dataclass(frozen=True)
class Precision:
    """Compute dtype and storage of the weights."""

    dtype: str = "auto"  # "auto": by checkpoint and machine
    weights: str = "auto"  # one of WEIGHT_DTYPES


def load_model(
    path: Path,
    name: str,
    device: torch.device,
    precision: Precision,
    attention_backend: str,
    lora: Path | None = None,
    progress: Callable[[float], None] | None = None,
    part_of: Callable[[ModelSpec], Shard] = Shard,
) -> LoadedModel:
    """Load the checkpoint in `path` to a device, or this rank's part of it.

    lora: directory of an adapter to merge. progress: called with the share of the weights read so far. part_of: returns
    the rank's part. Raises UsageError, NotFoundError, DeviceError.
    """
    bound_caches()
    keep_freed_memory()
    spec = read_spec(path)
    part = part_of(spec)
    check_known("weight dtype", precision.weights, WEIGHT_DTYPES)
    check_known("attention backend", attention_backend, ("auto", *BACKENDS))
    files = {file: file.stat() for file in checkpoint_files(path)}  # reports another format before a missing tokenizer
    compute_dtype = resolve_dtype(precision.dtype, device, spec, path)
    adapter = None
    if lora is not None:
        from cacheblend_cli.model.adapter import LoraAdapter

        adapter = LoraAdapter.read(lora)
    lora_digest = "" if adapter is None else adapter.digest
    tokenizer, generation = Tokenizer(path, spec.vocab_size), read_object(path / "generation_config.json")
    kernels = _kernels(attention_backend, device, spec)
    if device.type == "cuda":
        make_current(device)
        check_room(part.own, compute_dtype, device, torch.cuda.mem_get_info(device)[0])
    try:
        source = _quantised(spec, path, precision.weights, device, compute_dtype, progress)
        if spec.generic:
            from cacheblend_cli.model.generic.decoder import load_generic

            decoder: Decoder = load_generic(spec, path, compute_dtype, device, kernels, adapter)
        else:
            weights = load_weights(part, path, compute_dtype, device, adapter, progress, source)
            decoder = Decoder(spec, weights, kernels, compute_dtype, part)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the weights do not fit on {device}: {error}", "use a smaller model or --device cpu"
        ) from error
    fingerprints = {
        name: model_fingerprint(decoder.spec, path, dtype, lora_digest, precision.weights)
        for name, dtype in DTYPES.items()
    }
    return LoadedModel(
        name=name,
        path=path,
        decoder=decoder,
        tokenizer=tokenizer,
        fingerprint=fingerprints[str(compute_dtype).removeprefix("torch.")],
        fingerprints=fingerprints,
        identity=model_fingerprint(decoder.spec, path, torch.float32),
        eos_ids=_eos_ids(path, generation, spec.config, tokenizer),
        generation_config=generation,
        lora=lora,
        lora_digest=lora_digest,
        weight_dtype=precision.weights,
        files=files,
    )


def _kernels(attention_backend: str, device: torch.device, spec: ModelSpec) -> KernelBackend:
    """Return the kernels for a model on a device. Raises DeviceError."""
    try:
        kernels = select_backend(attention_backend, device)
        if spec.latent is None or kernels.has_latent_attention:
            return kernels
        if attention_backend == "auto":
            return select_backend("torch", device)
    except KernelError as error:
        raise DeviceError(error.message, error.hint) from error
    raise DeviceError(
        f"the {kernels.name} backend has no attention over latents (MLA), which a {spec.architecture} has: its "
        "kernels take K and V of one width",
        "use --attention-backend torch, or auto",
    )


def _quantised(
    spec: ModelSpec,
    path: Path,
    weight_dtype: str,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[float], None] | None,
) -> TensorSource | None:
    """Return a checkpoint's tensors quantised as `weight_dtype`, None for "auto". Raises UsageError, DeviceError."""
    if weight_dtype == "auto":
        return None
    if spec.generic:
        raise UsageError(
            f"--weight-dtype {weight_dtype} is not implemented for model_type {spec.config['model_type']!r}, whose "
            "weights transformers holds (generic path)",
            "leave it at auto",
        )
    if device.type != "cpu" or not compiled.multiplies(dtype):
        raise DeviceError(
            f"--weight-dtype {weight_dtype} is for CPUs, with compiled products and a dtype of float32 or bfloat16",
            "leave --weight-dtype out",
        )
    from cacheblend_cli.model.gguf_files.quantise import quantised_folder
    from cacheblend_cli.model.gguf_files.tensors import GGUFTensors

    source = tensor_source(path, spec.experts)
    check_tensors(spec, source, path)
    digest = model_fingerprint(spec, path, torch.float32)
    return GGUFTensors(quantised_folder(source, spec, weight_dtype, digest, progress))


def resolve_model(name: str, say: Callable[[str], None] | None = None) -> Path:
    """Return the path of a model: of a built-in name; a local directory, or the one that stands for a GGUF file; else a
    model of the hub, from its cache if possible (see `locate`). say: called when a GGUF file is read for the first
    time."""
    found = locate(name)
    if found.is_dir() and weight_names(found):
        return found
    from cacheblend_cli.model.gguf_files.conversion import gguf_in, model_dir_of

    if found.is_dir():
        found = gguf_in(found) or found
    return found if found.is_dir() else model_dir_of(found, say)


def resolve_dtype(name: str, device: torch.device, spec: ModelSpec, model_dir: Path) -> torch.dtype:
    """Return the compute dtype. `auto`: the checkpoint's own dtype; on a CPU bf16 if that is the checkpoint's and
    the CPU multiplies it natively, else fp32, which rounds nothing."""
    if name != "auto":
        check_known("dtype", name, ("auto", *DTYPES))
        return DTYPES[name]
    named = str(spec.config.get("dtype") or spec.config.get("torch_dtype") or weights_dtype(model_dir))
    stated = DTYPES.get(named.removeprefix("torch."), torch.float32)
    if device.type != "cpu" or (stated == torch.bfloat16 and compiled.has_bfloat16()):
        return stated
    return torch.float32


def weights_dtype(model_dir: Path) -> str:
    """Return the dtype of most elements of a checkpoint; bfloat16 if no tensor has one of DTYPES."""
    counts = dict.fromkeys(STORED_AS.values(), 0)
    for _, stored, shape in SafetensorsFiles(checkpoint_files(model_dir)).headers():
        if stored in STORED_AS:
            counts[STORED_AS[stored]] += math.prod(shape)
    most = max(counts, key=lambda name: counts[name])
    return most if counts[most] else "bfloat16"


def model_fingerprint(
    spec: ModelSpec, path: Path, dtype: torch.dtype, lora_digest: str = "", weight_dtype: str = "auto"
) -> str:
    """Return blake2b-128 over everything that K and V depend on: shape, RoPE, weights, how they are read and stored,
    compute dtype, adapter. On the generic path the spec covers only some fields of config.json, so all fields count
    that may affect a forward pass."""
    # fields added later for other families do not change the fingerprint while they have their default
    values = ((f.name, getattr(spec, f.name), f.default) for f in fields(spec) if f.name != "config")
    shape = {name: value for name, value, default in values if value != default}
    if spec.generic:
        shape["config"] = {name: value for name, value in spec.config.items() if name not in OTHER_FIELDS}
    parts = json.dumps(shape, sort_keys=True, default=str) + weights_digest(path) + str(dtype) + lora_digest
    if quantisation := quantisation_of(path):
        parts += repr(quantisation)
    parts += "" if weight_dtype == "auto" else weight_dtype
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def _eos_ids(
    path: Path, generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Tokenizer
) -> frozenset[int]:
    """Return all ids named by generation_config.json, config.json and the tokenizer, since each lacks some in certain
    checkpoints. If generation_config.json names none, also the token that the chat template puts after an answer (Llama
    3's tokenizer names a different one)."""
    ids = set[int]()
    for place in (generation, config):
        found = place.get("eos_token_id")
        named = [] if found is None else found if isinstance(found, list) else [found]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in named):
            raise UsageError(f"eos_token_id of {path} must be an id or a list of ids, not {found!r}", "correct it")
        ids.update(named)
    token = tokenizer.special("eos_token")
    own = tokenizer.token_id(token) if token else None
    behind = None if generation.get("eos_token_id") is not None else _turn_end(tokenizer)
    return frozenset(ids | {i for i in (own, behind) if i is not None})


def _turn_end(tokenizer: Tokenizer) -> int | None:
    """Return the control token that the chat template puts directly after a model's message; None if there is none, or
    no template. Not for gpt-oss: its `<|end|>` ends a channel, and the answer follows in the next one."""
    if not tokenizer.has_template or tokenizer.knows("<|channel|>"):
        return None
    texts = {"user": _ASKED, "assistant": _ANSWERED}
    messages = [{"role": role, "content": text} for role, text in texts.items()] + [{"role": "user", "content": _NEXT}]
    try:
        rendered = tokenizer.render(messages, datetime.now(), {}).text
    except UsageError:
        return None
    behind = rendered.partition(_ANSWERED)[2].partition(_NEXT)[0]
    first = next(iter(tokenizer.encode_template_rest(behind.lstrip())), None)
    return first if first in tokenizer.control_ids else None
