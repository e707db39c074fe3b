"""No architecture is wrong, and docs/models.md says of each what is so."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests_models.architectures import ALIASES, FAMILIES, NOT_CAUSAL, ROWS, VARIANTS, by_family
from tests_models.check import check_model, quiet
from tests_models.table import PAGE, line_of, read, with_rows

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", by_family(ROWS))
def test_an_architecture_is_exact_or_refused(name: str) -> None:
    quiet()
    outcome = check_model(name)
    assert not outcome.wrong, f"{name}: {outcome}"
    told = read(PAGE.read_text(encoding="utf-8")).get(name)
    assert told is not None, f"run python -m tests_models.table {name!r}"
    found = line_of(name, outcome)
    assert told.verdict == found.verdict, f"run python -m tests_models.table {name!r}: {found}"


def test_the_page_has_every_row_and_nothing_else() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert list(read(page)) == ROWS, "run python -m tests_models.table"
    assert page == with_rows(page, read(page))


def test_every_verdict_has_a_family_in_the_gate() -> None:
    page = read(PAGE.read_text(encoding="utf-8"))
    verdicts = {page[name].verdict for name in FAMILIES.values()}
    assert verdicts == {line.verdict for line in page.values()}


def test_every_architecture_of_transformers_is_somewhere() -> None:
    listed = {*ROWS, *ALIASES, *(name for names in NOT_CAUSAL.values() for name in names)}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == listed - set(VARIANTS)


@pytest.mark.parametrize(
    "name", ["gemma3_text", "gpt_oss", "mistral, windowed", "qwen3_next", "cohere2"]
)
def test_models_that_people_train_train_on_trees(name: str) -> None:
    assert read(PAGE.read_text(encoding="utf-8"))[name].trains == "tree"
