"""The fingerprint of a model: no field of config.json that changes what is computed leaves it as it is."""

from __future__ import annotations

import copy
import json
import os
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
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.model.description import Precision, model_fingerprint, weights_digest
from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.loading import load_model
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

CPU = torch.device("cpu")
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


Place = tuple[str | int, ...]


def leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """The plain values inside a config, and the keys that lead to each."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*place, key))
    else:
        yield place, value


def edited(config: dict[str, Any], edits: dict[Place, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    for (*outer, last), value in edits.items():
        inside: Any = changed
        for key in outer:
            inside = inside[key]
        inside[last] = value
    return changed


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

    def fingerprint(config: dict[str, Any]) -> str:
        return model_fingerprint(spec_from_config(config), path, "float32")

    def check(edits: dict[Place, Any]) -> None:
        """All at once, and by halves where that is refused or changes anything."""
        file.write_text(json.dumps(edited(config, edits)))
        with suppress(CacheBlendError):
            if fingerprint(json.loads(file.read_text())) == own and torch.equal(logits_of(path), wanted):
                return
            assert len(edits) > 1, edits
        if len(edits) > 1:
            places = list(edits)
            for half in (places[: len(places) // 2], places[len(places) // 2 :]):
                check({place: edits[place] for place in half})

    file.write_text(json.dumps(config))
    own, wanted = fingerprint(config), logits_of(path)
    changed = 0
    alike: list[dict[Place, Any]] = []  # edits with the same fingerprint, one of each place
    for place, value in leaves(config):
        number = 0
        for other in OTHER_VALUES[type(value)]:
            if other == value:
                continue
            try:
                if fingerprint(edited(config, {place: other})) != own:
                    changed += 1
                    continue
            except CacheBlendError:
                continue
            if number == len(alike):
                alike.append({})
            alike[number][place] = other
            number += 1
    for edits in alike:
        check(edits)
    assert changed >= 5


def test_a_file_of_weights_that_changes_and_keeps_its_time_is_read_again(tmp_path: Path) -> None:
    """As when an archive is extracted over it."""
    hub_models.RUN[0].write(tmp_path / "m")
    file, before = tmp_path / "m" / "model.safetensors", weights_digest(tmp_path / "m")
    was = file.stat()
    with open(file, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        [last] = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert weights_digest(tmp_path / "m") != before
