"""The index of what rollouts say: texts, previews, breaks and advantages, beside the run."""

import pytest

import golden_kit
from rolltree.insight.page.evaluation_view import evaluation_view
from rolltree.insight.page.glance import run_glance
from rolltree.insight.page.pages import rollout_page, row_previews
from rolltree.insight.search import SearchIndex
from rolltree.records.notices import notice_sentences
from rolltree.records.tokenizer import choose_tokenizer, why_raw
from rolltree.rollouts.conversation import conversation_of
from rolltree.rollouts.decode import decode_rollout
from rolltree.store import Event, Run, StoredRollout
from rolltree.store.conditions import parted
from rolltree.values.errors import ConfigError


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    folder = golden_kit.unpack("4/tools", tmp_path_factory.mktemp("search") / "tools")
    with Run.open(folder, mode="r") as run:
        yield run


@pytest.fixture(scope="module")
def index(tools, tmp_path_factory):
    made = SearchIndex(tools, tmp_path_factory.mktemp("cache") / "texts.db")
    made.build()
    return made


def said(run, text):
    """Return the rollouts whose question or completion has a text, by reading all of them."""
    found = set()
    for row in run.rollouts():
        for state in decode_rollout(row).states:
            prompt, completion = conversation_of(state)
            if text in str(prompt[-1:] + completion):
                found.add(row.request_id)
    return found


@pytest.mark.parametrize("text", ["4 x kite", "total in cents", "price", "never said"])
def test_a_text_is_found_where_it_was_said(tools, index, text):
    page = rollout_page(tools, text=text, index=index)
    assert {row["request_id"] for row in page["rows"]} == said(tools, text)
    assert page["total"] == len(page["rows"])


def test_text_filters_and_orders_go_together(tools, index):
    every = rollout_page(tools)["rows"]
    facts = {
        (each["request_id"], each["trajectory_index"]): each
        for each in row_previews(tools, [(r["request_id"], r["trajectory_index"]) for r in every])
    }
    page = rollout_page(
        tools, where="breaks >= 1 and status = ok", sort="-breaks", index=index, offset=1, limit=3
    )
    names = [(row["request_id"], row["trajectory_index"]) for row in page["rows"]]
    wanted = [
        (row["request_id"], row["trajectory_index"])
        for row in every
        if facts[row["request_id"], row["trajectory_index"]]["breaks"] >= 1
        and row["status"] == "ok"
    ]
    wanted.sort(key=lambda name: -facts[name]["breaks"])
    assert page["total"] == len(wanted) > 4
    assert names == wanted[1:4]
    by_run = rollout_page(tools, where="breaks >= 1", sort="-num_calls", index=index)["rows"]
    calls = [row["num_calls"] for row in by_run]
    assert calls == sorted(calls, reverse=True)


def test_previews_are_the_same_with_and_without_the_index(tools, index):
    names = [(row.request_id, row.trajectory_index) for row in tools.rollouts(blobs=False)]
    assert row_previews(tools, names) == row_previews(tools, names, index)
    assert all(each["question"] for each in row_previews(tools, names))


def test_an_index_that_is_missing_says_what_to_ask_for(tools, tmp_path):
    index = SearchIndex(tools, tmp_path / "none.db")
    assert index.state() == {"indexed": 0, "of": 8, "is_whole": False}
    with pytest.raises(ConfigError, match="not indexed"):
        rollout_page(tools, text="kite", index=index)


def test_an_index_grows_with_its_run_and_begins_again_when_rows_are_gone(tmp_path):
    def row(name, error=None):
        error_type = None if error is None else "ToolError"
        errors = () if error is None else ({"type": "ToolError", "message": error},)
        status = "ok" if error is None else "error"
        return StoredRollout(
            request_id=name, errors=errors, status=status, error_type=error_type, phase="eval"
        )

    with Run.create(tmp_path / "run", kind="eval") as run:
        index = SearchIndex(run, tmp_path / "texts.db")
        run.add_rollouts([row("a", "the disk is full"), row("b", "no answer")])
        index.build()
        assert index.state()["is_whole"]
        run.add_rollouts([row("c", "the disk is full")])
        assert not index.state()["is_whole"]
        index.build()
        assert index.names(index.ids("disk is", (), None)) == [("a", 0), ("c", 0)]
        run.add_rollouts([row("c", "no answer")], replace_failed=True)  # its id is used again
        assert not index.state()["is_whole"]
        index.build()
        assert index.names(index.ids("disk is", (), None)) == [("a", 0)]
    with Run.create(tmp_path / "other", kind="eval") as other:
        assert SearchIndex(other, tmp_path / "texts.db").state()["indexed"] == 0


def test_conditions_are_parted_by_their_columns():
    own, rest = parted("reward < 1 and breaks > 2 and task ~ add", ("breaks",))
    assert [(each.name, each.operator, each.value) for each in own] == [("breaks", ">", 2)]
    assert rest == "reward < 1 and task ~ add"
    with pytest.raises(ConfigError, match="does not compare two numbers"):
        parted("breaks > many", ("breaks",))


def test_a_glance_has_the_worst_sentence(tools):
    found = run_glance(tools)
    assert found["health"]["severity"] == "error"
    assert "ServerError" in found["health"]["text"]
    assert found["curve"] == []


def test_a_notice_is_there_once_with_its_number():
    events = [Event("notice", float(at), None, {"message": "the judge is away"}) for at in range(3)]
    (found,) = notice_sentences([*events, Event("checkpoint", 9.0, 1, {})])
    assert found == {
        **{"text": "The judge is away.", "kind": "notice", "times": 3},
        **{"step": None, "created_at": 2.0},
    }


def test_the_worst_examples_of_an_evaluation_come_first(tools):
    found = evaluation_view(tools, "eval")
    means = [each["reward"] for each in found["worst"]]
    assert means == sorted(means)
    assert found["report"]["failures"] == {"ServerError": 2}
    assert found["worst"][0]["question"].startswith("Order")


def test_raw_ids_say_why(tools, tmp_path):
    assert "'scripted' is not on this machine" in why_raw(tools)
    with pytest.raises(ConfigError, match="not a tokenizer"):
        choose_tokenizer(tmp_path)
    choose_tokenizer(None)
