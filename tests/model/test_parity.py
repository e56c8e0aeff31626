"""Models as the hub has them, in small: read as transformers reads them and blended as a second implementation blends,
or refused by the name of what is not implemented."""

from __future__ import annotations

from pathlib import Path

import hub_families
import hub_generic
import hub_models
import pytest
import torch
from hub_models import HubModel
from parity import compare, write_documents

from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.loading import load_model

RUN = [*hub_models.RUN, *hub_families.RUN, *hub_generic.RUN]
REFUSED = [*hub_models.REFUSED, *hub_families.REFUSED, *hub_generic.REFUSED]
TOLERANCE = 1e-4  # of logits up to some 10: the engine computes in float32, the reference in float64


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "2" and "3", of documents with so many paragraphs."""
    folder = tmp_path_factory.mktemp("documents")
    for count in (2, 3):
        write_documents(folder / str(count), count)
    return folder


@pytest.mark.parametrize("model", RUN, ids=lambda model: model.name)
def test_full_prefill_and_decoding_are_transformers_and_blending_is_the_reference(
    model: HubModel, tmp_path: Path, documents: Path
) -> None:
    found = compare(model, tmp_path, documents / ("2" if model.tokenizer is None else "3"))
    assert found.num_tokens > 100
    assert found.reference <= 1e-5, "the reference itself"
    assert found.full <= TOLERANCE
    assert found.everything <= TOLERANCE
    assert found.same_choice
    assert found.some <= TOLERANCE
    assert found.repair > 10 * TOLERANCE, "or this would prove little"
    assert found.same_answer


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.name)
def test_unsupported_models_are_refused_by_name(model: HubModel, tmp_path: Path) -> None:
    model.write(tmp_path / "m")
    with pytest.raises(CacheBlendError) as refused:
        load_model(tmp_path / "m", "m", torch.device("cpu"), Precision("float32"), "torch")
    assert model.refused in refused.value.message
    assert refused.value.hint
    assert refused.value.exit_code == 2


def test_there_are_enough_of_them() -> None:
    assert len({model.name for model in RUN}) == len(RUN) >= 60
    assert len({model.name for model in REFUSED}) == len(REFUSED)
