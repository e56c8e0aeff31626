"""Answers of a form, biased tokens, and where they end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from engine_driver import CoreDriver, StoredEngine, ids_of, open_stored_engine

from cacheblend_cli.engine.events import Failed, Limits
from cacheblend_cli.errors import UsageError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("grammar"), num_hidden_layers=2) as stored:
        yield stored


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_is_of_its_schema(stored: StoredEngine, seed: int) -> None:
    """From a model that knows nothing, alone and beside others of no form."""
    form = {"json_schema": json.dumps(SCHEMA), "max_tokens": 200, "temperature": 1.0, "seed": seed}
    alone = stored.engine.run_alone(stored.store, stored.question(**form))
    found = json.loads(alone.text)
    assert set(found) == {"name", "age"}
    assert 0 <= found["age"] <= 99
    assert alone.finish_reason == "stop"
    driver = CoreDriver(stored, Limits(enable_prefix_caching=False))
    listeners = [driver.arrive(q)[0] for q in (stored.question(), stored.question(**form), stored.question(seed=5))]
    driver.run()
    assert ids_of(listeners[1]) == [alone.generated_ids]


def test_an_answer_is_of_its_regular_expression(stored: StoredEngine) -> None:
    answer = stored.engine.run_alone(stored.store, stored.question(regex="[a-f]{3}-[0-9]{2}", max_tokens=40))
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", answer.text)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("form", "told"), [({"regex": "(a"}, "regular"), ({"json_schema": "{"}, "JSON"), ({"json_schema": '{"type": 3}'}, "schema")]
)  # fmt: skip
def test_a_form_that_makes_no_sense_is_refused(stored: StoredEngine, form: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        stored.engine.run_alone(stored.store, stored.question(**form))
    driver = CoreDriver(stored, Limits())
    listener, _ = driver.arrive(stored.question(**form))
    driver.run()
    last = listener.last.result(0)
    assert isinstance(last, Failed)
    assert isinstance(last.error, UsageError)


def test_a_bias_moves_the_choice(stored: StoredEngine) -> None:
    plain = stored.engine.run_alone(stored.store, stored.question())
    token = (plain.generated_ids[0] + 1) % 300
    pushed = stored.engine.run_alone(stored.store, stored.question(logit_bias=((token, 1000.0),)))
    assert set(pushed.generated_ids) == {token}
    banned = stored.engine.run_alone(stored.store, stored.question(logit_bias=((plain.generated_ids[0], -1000.0),)))
    assert plain.generated_ids[0] not in banned.generated_ids
    with pytest.raises(UsageError, match="logit_bias"):
        stored.engine.run_alone(stored.store, replace(stored.question(logit_bias=((99999, 1.0),))))
