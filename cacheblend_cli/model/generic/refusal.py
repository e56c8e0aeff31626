"""What a model is told that cannot run on transformers' own layers."""

from __future__ import annotations

from cacheblend_cli.errors import UsageError


def not_generic(model_type: object, reason: str) -> UsageError:
    """reason: what it has or lacks, as the end of a sentence."""
    return UsageError(
        f"model_type {model_type!r} has no implementation of its own here, and cannot run on transformers' layers: {reason}",
        "docs/models.md lists the models that can be used",
    )
