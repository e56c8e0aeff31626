"""LoRA adapters in peft's format, merged into a model's weights while these are read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.model.families.values import is_number, shown
from cacheblend_cli.model.model_files import ADAPTER_FILES, read_object

CONFIG, WEIGHTS = ADAPTER_FILES
BASE = "base_model.model."
FREE = (
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    # without effect on a trained adapter's computation
    "base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version", "lora_dropout",
    "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_config", "megatron_core",
    "qalora_group_size", "eva_config", "corda_config", "loftq_config", "ensure_weight_tying",
)  # fmt: skip
"""Fields of adapter_config.json with any value."""
UNSET: tuple[Any, ...] = (None, False, 0, "", [], {})
VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal"),  # others change the model's own weights
}
"""Accepted values of other fields, if they are not UNSET."""
HINT = "merge the adapter into its model with peft (merge_and_unload, then save_pretrained), and give that directory"


@dataclass(frozen=True)
class Delta:
    """Additive update of a weight: scale * up @ down. down: [r, columns], up: [rows, r], both float32."""

    down: Tensor
    up: Tensor
    scale: float

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows start:stop of the update, [stop - start, columns] float32."""
        return self.up[start:stop] @ self.down * self.scale


@dataclass(frozen=True)
class LoraAdapter:
    """LoRA updates by module."""

    path: Path
    deltas: Mapping[str, Delta]  # by the module's name in the model's class

    @classmethod
    def read(cls, path: Path) -> LoraAdapter:
        """Read an adapter. Raises NotFoundError if there is none, UsageError naming a field that is not supported."""
        for name in (CONFIG, WEIGHTS):
            if not (path / name).is_file():
                raise NotFoundError(
                    f"{path} is not a LoRA adapter: it has no {name}",
                    f"give --lora the directory that peft's save_pretrained wrote, with {CONFIG} and {WEIGHTS}",
                )
        config = _Config(path / CONFIG)
        pairs = _pairs(path / WEIGHTS)
        deltas = {}
        for module, (down, up) in sorted(pairs.items()):
            if not config.is_target(module):
                raise config.refused(
                    f"{WEIGHTS} has {module}, which target_modules does not name: peft would not use it"
                )
            rank, scale = config.rank_and_scale(module)
            if down.ndim != 2 or up.ndim != 2 or not down.shape[0] == up.shape[1] == rank:
                raise config.refused(
                    f"the tensors of {module} are {list(down.shape)} and {list(up.shape)}; {CONFIG} gives rank {rank}"
                )
            deltas[module] = Delta(down.float().contiguous(), up.float().contiguous(), scale)
        if not deltas:
            raise _refused(path, f"{WEIGHTS} is empty")
        return cls(path, deltas)

    @property
    def digest(self) -> str:
        """blake2b-128, hex, over all updates."""
        digest = hashlib.blake2b(digest_size=16)
        for module, delta in self.deltas.items():
            digest.update(repr((module, delta.scale, tuple(delta.down.shape), tuple(delta.up.shape))).encode())
            digest.update(delta.down.numpy().data)
            digest.update(delta.up.numpy().data)
        return digest.hexdigest()

    def check_shape(self, module: str, wanted: Sequence[int]) -> None:
        """Raise UsageError if the update of a module does not have the shape of its weight, [rows, columns]."""
        delta = self.deltas[module]
        made = [delta.up.shape[0], delta.down.shape[1]]
        if made != list(wanted):
            raise UsageError(
                f"the adapter {self.path} expects {module} of shape {made}; the model's is {list(wanted)}",
                "use the adapter with the model it was trained for",
            )

    def misplaced(self, module: str, reason: str) -> UsageError:
        return UsageError(f"the adapter {self.path} changes {module}, {reason}", "use another adapter or model")


class _Config:
    """adapter_config.json, checked."""

    def __init__(self, path: Path) -> None:
        self.folder, self.values = path.parent, read_object(path)
        for name, value in ({"peft_type": None} | self.values).items():
            if name not in FREE and value not in VALUES.get(name, UNSET):
                raise self.refused(f"{name} = {shown(value)} in {CONFIG} is not implemented")

    def is_target(self, module: str) -> bool:
        """Return whether target_modules names the module, by the end of its name or by a pattern, as peft reads it."""
        named = self.values.get("target_modules")
        if isinstance(named, list):
            return any(module == name or module.endswith(f".{name}") for name in named)
        try:
            return named == "all-linear" or re.fullmatch(str(named), module) is not None
        except re.error as error:
            raise self.refused(f"target_modules in {CONFIG} is not a pattern: {error}") from error

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return r, and alpha / r or alpha / sqrt(r)."""
        rank = self._value("rank_pattern", "r", 8, module)
        alpha = self._value("alpha_pattern", "lora_alpha", 8, module)
        if not is_number(rank) or not is_number(alpha) or rank < 1 or rank != int(rank):
            raise self.refused(f"r and lora_alpha of {module} are {shown(rank)} and {shown(alpha)}")
        return int(rank), alpha / (rank**0.5 if self.values.get("use_rslora") else rank)

    def _value(self, patterns: str, name: str, missing: int, module: str) -> Any:
        """Return, as peft does, the value of the first pattern that the module's name ends with, else the default."""
        try:
            for pattern, value in (self.values.get(patterns) or {}).items():
                if re.fullmatch(rf"(.*\.)?({pattern})", module):
                    return value
        except (AttributeError, re.error) as error:
            raise self.refused(f"{patterns} in {CONFIG} is not an object of patterns: {error}") from error
        return self.values.get(name, missing)

    def refused(self, reason: str) -> UsageError:
        return _refused(self.folder, reason)


def _pairs(file: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Read (A, B) per module from the adapter's file."""
    parts: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                module, _, kind = name.removeprefix(BASE).rpartition(".lora_")
                if not name.startswith(BASE) or kind not in ("A.weight", "B.weight"):
                    raise _refused(file.parent, f"its tensor {name} is not part of a plain LoRA of a linear layer")
                parts.setdefault(module, {})[kind] = handle.get_tensor(name)
    except SafetensorError as error:
        raise UsageError(f"{file} is not a readable safetensors file: {error}", "fetch the adapter again") from error
    for module, pair in parts.items():
        if len(pair) != 2:
            raise _refused(file.parent, f"of {module} it has only lora_{next(iter(pair))}")
    return {module: (pair["A.weight"], pair["B.weight"]) for module, pair in parts.items()}


def _refused(path: Path, reason: str) -> UsageError:
    return UsageError(f"the adapter {path} is not read: {reason}", HINT)
