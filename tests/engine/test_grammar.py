"""Answers of a form, biased tokens, and where they end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from houses import Bench, House, ids_of, open_house

from cacheblend_cli.engine.events import Failed, Limits
from cacheblend_cli.errors import UsageError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("grammar"), num_hidden_layers=2) as house:
        yield house


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_is_of_its_schema(house: House, seed: int) -> None:
    """From a model that knows nothing, alone and beside others of no form."""
    form = {"json_schema": json.dumps(SCHEMA), "max_tokens": 200, "temperature": 1.0, "seed": seed}
    alone = house.engine.run_alone(house.store, house.question(**form))
    found = json.loads(alone.text)
    assert set(found) == {"name", "age"}
    assert 0 <= found["age"] <= 99
    assert alone.finish_reason == "stop"
    bench = Bench(house, Limits(enable_prefix_caching=False))
    listeners = [bench.arrive(q)[0] for q in (house.question(), house.question(**form), house.question(seed=5))]
    bench.run()
    assert ids_of(listeners[1]) == [alone.generated_ids]


def test_an_answer_is_of_its_regular_expression(house: House) -> None:
    answer = house.engine.run_alone(house.store, house.question(regex="[a-f]{3}-[0-9]{2}", max_tokens=40))
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", answer.text)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("form", "told"), [({"regex": "(a"}, "regular"), ({"json_schema": "{"}, "JSON"), ({"json_schema": '{"type": 3}'}, "schema")]
)  # fmt: skip
def test_a_form_that_makes_no_sense_is_refused(house: House, form: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        house.engine.run_alone(house.store, house.question(**form))
    bench = Bench(house, Limits())
    listener, _ = bench.arrive(house.question(**form))
    bench.run()
    last = listener.last.result(0)
    assert isinstance(last, Failed)
    assert isinstance(last.error, UsageError)


def test_a_bias_moves_the_choice(house: House) -> None:
    plain = house.engine.run_alone(house.store, house.question())
    token = (plain.generated_ids[0] + 1) % 300
    pushed = house.engine.run_alone(house.store, house.question(logit_bias=((token, 1000.0),)))
    assert set(pushed.generated_ids) == {token}
    banned = house.engine.run_alone(house.store, house.question(logit_bias=((plain.generated_ids[0], -1000.0),)))
    assert plain.generated_ids[0] not in banned.generated_ids
    with pytest.raises(UsageError, match="logit_bias"):
        house.engine.run_alone(house.store, replace(house.question(logit_bias=((99999, 1.0),))))
