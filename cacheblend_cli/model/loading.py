"""Loading a model: a local directory, a GGUF file or a hub id; its dtype and fingerprint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from cacheblend_kernels import BACKENDS, KernelBackend, KernelError, compiled, select_backend

from cacheblend_cli.errors import DeviceError, UsageError, check_known
from cacheblend_cli.model.checkpoint import tensor_source
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.description import (
    DTYPES,
    WEIGHT_DTYPES,
    ModelDescription,
    Precision,
    describe,
    model_fingerprint,
    resolve_dtype,
)
from cacheblend_cli.model.device import check_room, make_current
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.host_memory import keep_freed_memory
from cacheblend_cli.model.linear import bound_caches
from cacheblend_cli.model.model_files import checkpoint_files, read_object
from cacheblend_cli.model.parallel import Shard
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.tensor_source import TensorSource
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.model.weights import check_tensors, load_weights

_TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPES}
_ASKED, _ANSWERED, _NEXT = "5d1f0 asked", "5d1f1 answered", "5d1f2 next"


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, kw_only=True)
class LoadedModel(ModelDescription):
    """A decoder with its tokenizer and metadata."""

    decoder: Decoder
    eos_ids: frozenset[int]
    generation_config: Mapping[str, Any] = field(default_factory=dict)  # contents of the model's file, unchecked
    files: Mapping[Path, os.stat_result] = field(default_factory=dict)  # files of the weights, as they were at loading

    @property
    def loaded(self) -> LoadedModel:
        return self

    @property
    def has_same_files(self) -> bool:
        """Return whether the files of the weights are those that were loaded."""
        with suppress(OSError):
            return all(_stamp(file.stat()) == _stamp(before) for file, before in self.files.items())
        return False

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
    compute_dtype = _TORCH_DTYPES[dtype := resolve_dtype(precision.dtype, device.type, spec, path)]
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
    described = describe(decoder.spec, path, name, replace(precision, dtype=dtype), tokenizer, lora, lora_digest)
    return LoadedModel(
        **vars(described),
        decoder=decoder,
        eos_ids=_eos_ids(path, generation, spec.config, tokenizer),
        generation_config=generation,
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
    digest = model_fingerprint(spec, path, "float32")
    return GGUFTensors(quantised_folder(source, spec, weight_dtype, digest, progress))


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
