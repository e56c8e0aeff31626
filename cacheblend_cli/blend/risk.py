"""Probability that blended KV changes a token, estimated from its logits.

A logistic regression over statistics of the distribution, fitted by `cacheblend eval --fit-risk` and kept in the
user's data directory: a file per model, KV codec, collect context and blend settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from cacheblend_store import private_files
from platformdirs import user_data_path
from torch import Tensor

from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.types import BlendParams

FORMAT, SIGNALS = 2, 4  # the format: one more where blending computes otherwise


@dataclass(frozen=True)
class RiskFit:
    """The log odds are bias + weights @ signals."""

    weights: tuple[float, ...]
    bias: float
    tokens: int  # of the answers it was fitted on
    answers: int
    differing: int  # answers that differ from a full prefill's

    def of_tokens(self, signals: Tensor) -> Tensor:
        """Return, for each token, the probability that a full prefill prefers another one, [num_tokens] fp64. signals:
        see `signals_of`."""
        return torch.sigmoid(signals @ torch.tensor(self.weights, dtype=torch.float64) + self.bias)


def signals_of(logits: Tensor) -> Tensor:
    """Return the features of each token, [num_tokens, SIGNALS] fp64 on the CPU: by how much the likeliest token leads
    the second in log-probability, the entropy in nats, and the square roots of both. logits: [num_tokens,
    vocab_size]."""
    found = torch.log_softmax(logits.float(), -1)
    first, second = found.topk(2).values.unbind(-1)
    entropy = -(found.exp() * found).sum(-1)
    known = torch.stack((first - second, entropy), -1).clamp_min(0)
    return torch.cat((known, known.sqrt()), -1).cpu().double()


@dataclass(frozen=True)
class RiskFile:
    """File of a fit."""

    path: Path

    @classmethod
    def of(cls, collection: Collection, contexts: Sequence[str], blend: BlendParams) -> RiskFile:
        """Return the file for the collection's model and codec, the chunks' contexts and the blend settings (except
        seed and limit)."""
        policy = {name: value for name, value in asdict(blend).items() if name not in ("seed", "max_risk")}
        identity = json.dumps(
            [FORMAT, collection.model.fingerprint, collection.codec, sorted(contexts), policy], sort_keys=True
        )
        name = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        return cls(user_data_path("cacheblend") / "risk" / f"{name}.json")

    def read(self) -> RiskFit | None:
        """Return the fit, None if the file is missing or invalid."""
        try:
            found = msgspec.json.decode(private_files.read_bytes(self.path, 1 << 20), type=RiskFit)
        except (OSError, msgspec.MsgspecError):
            return None
        return found if len(found.weights) == SIGNALS else None

    def write(self, fit: RiskFit) -> None:
        """Raises OSError."""
        private_files.replace(self.path, json.dumps(asdict(fit)).encode())
