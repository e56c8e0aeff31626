"""The fingerprint of a model: no field of config.json that changes what is computed leaves it as it is."""

from __future__ import annotations

import copy
import json
from collections import ChainMap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hub_families
import hub_generic
import hub_models
import pytest
import torch
from hub_models import HubModel

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.prefill import prefill
from cacheblend_cli.engine.request import resolve
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.loading import Precision, load_model, model_fingerprint
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

CPU = torch.device("cpu")
TOGETHER = 6  # fields whose edits are tried at once, and one by one where that is refused or changes anything
OTHER_VALUES: dict[type, tuple[Any, ...]] = {
    bool: (False, True),
    int: (1, 3, 64),
    float: (0.3, 3.0),
    str: ("silu", "relu2", "sigmoid", "full_attention", "sliding_attention", "linear"),
    type(None): (0.3, 2),
}


def first_of_each_class() -> list[HubModel]:
    models = [m for m in (*hub_models.RUN, *hub_families.RUN, *hub_generic.RUN) if m.change is None]
    return list({m.config.__qualname__: m for m in reversed(models)}.values())


def edits(value: Any) -> Iterator[Any]:
    """Other values of a field, also of those inside it."""
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            for other in edits(value[key]):
                changed = copy.deepcopy(value)
                changed[key] = other
                yield changed
    else:
        yield from (other for other in OTHER_VALUES[type(value)] if other != value)


def logits_of(path: Path) -> torch.Tensor:
    """Of a prompt, by every one of its positions."""
    model = load_model(path, "m", CPU, Precision("float32"), "torch")
    runtime = Runtime(model, EngineConfig(block_size=16, prompt="{chunks}\n\n{question}"))
    request = resolve(
        runtime,
        None,
        AskRequest("where does Mara work? " * 3, [], BlendParams(mode="full"), SamplingParams(max_tokens=1)),
    )
    done = prefill(runtime, request, output_positions=lambda plan: torch.arange(plan.num_tokens))
    done.sequence.release()
    return done.result.logits


@pytest.mark.parametrize("model", first_of_each_class(), ids=lambda model: model.name)
def test_what_changes_logits_changes_the_fingerprint(model: HubModel, tmp_path: Path) -> None:
    """Every field, with several values: refused, another fingerprint, or the very same logits."""
    path = tmp_path / "m"
    model.write(path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.pop("vision_config", None)  # pictures are not read

    def fingerprint() -> str:
        return model_fingerprint(read_spec(path), path, torch.float32)

    def is_harmless(edit: dict[str, Any]) -> bool:
        """Return whether the edit changes neither fingerprint nor logits. Raises CacheBlendError if it is refused."""
        file.write_text(json.dumps(config | edit))
        return fingerprint() == own and torch.equal(logits_of(path), wanted)

    own, wanted = fingerprint(), logits_of(path)
    changed = 0
    harmless: list[list[dict[str, Any]]] = []  # edits with the same fingerprint, by the number of the value
    for name, value in config.items():
        number = 0
        for other in edits(value):
            file.write_text(json.dumps(config | {name: other}))
            try:
                if fingerprint() != own:
                    changed += 1
                    continue
            except CacheBlendError:
                continue
            if number == len(harmless):
                harmless.append([])
            harmless[number].append({name: other})
            number += 1
    for alike in harmless:
        for start in range(0, len(alike), TOGETHER):
            group = alike[start : start + TOGETHER]
            with suppress(CacheBlendError):
                if is_harmless(dict(ChainMap(*group))):
                    continue
            for edit in group:
                with suppress(CacheBlendError):
                    assert is_harmless(edit), edit
    assert changed >= 5
