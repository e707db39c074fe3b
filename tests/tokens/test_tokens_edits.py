"""Edits in place of a step's lists take effect: in the step, its copies, the store and samples."""

from __future__ import annotations

import copy
import heapq
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
from test_tokens_step import talk
from test_tokens_trajectory import make_response, plain_step

from rolltree.rollouts.message_table import MessageReader, MessageTable
from rolltree.rollouts.record_steps import decode_trajectory, trajectory_data
from rolltree.samples import build_samples
from rolltree.store import dumps, loads
from rolltree.tokens import Trajectory
from rolltree.values.errors import TokenError


def recorded() -> Trajectory:
    """Return two calls, the second of which continues the first."""
    made = Trajectory()
    for number, (prompt, sampled) in enumerate([([1, 2], [3, 4, 5]), ([1, 2, 3, 4, 5, 6], [7, 8])]):
        response = make_response(prompt, sampled, 900 + number)
        made.append_call(prompt="", completion="", response=response, turn=number)
    return made


def by_hand() -> Trajectory:
    return Trajectory([plain_step([1, 2], [3, 4, 5]), plain_step([1, 2, 3, 4, 5, 6], [7, 8])])


def decoded() -> Trajectory:
    return stored(recorded())


def stored(trajectory: Trajectory) -> Trajectory:
    """Return what the store gives back of a trajectory."""
    table = MessageTable()
    data = loads(dumps(trajectory_data(trajectory, table)))
    reader = MessageReader(loads(table.to_json()))
    return decode_trajectory(data, trajectory.tree.to_bytes(), reader)


MAKERS = [recorded, by_hand, decoded]
MASKS: dict[str, Callable[[list[Any]], Any]] = {
    "item": lambda mask: mask.__setitem__(0, 0),
    "slice": lambda mask: mask.__setitem__(slice(0, 3), [0, 1, 1]),
    "pop and insert": lambda mask: (mask.pop(0), mask.insert(0, 0)),
    "clear and extend": lambda mask: (mask.clear(), mask.extend([0, 1, 1])),
    "+=": lambda mask: (mask.__delitem__(slice(None)), mask.__iadd__([0, 1, 1])),
    "append": lambda mask: (mask.__delitem__(slice(0, 2)), mask.insert(0, 0), mask.append(1)),
    "reversed": lambda mask: (mask.__setitem__(2, 0), mask.reverse()),
    "sorted": lambda mask: (mask.__setitem__(2, 0), mask.sort()),
    "by C code": lambda mask: (mask.__setitem__(1, 0), heapq.heapify(mask)),
}


def weights(trajectory: Any) -> list[list[float]]:
    """Return the loss weights of each call's tokens in the training samples."""
    records = build_samples([trajectory], "step").samples
    return [sample.records.weight.tolist() for sample in records]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("edit", list(MASKS))
def test_a_mask_that_is_edited_in_place_is_trained(make: Any, edit: str) -> None:
    trajectory = make()
    assert weights(trajectory) == [[1, 1, 1], [1, 1]]
    MASKS[edit](trajectory[0]["tokens"]["completion_mask"])
    for found in (trajectory, stored(trajectory), copy.deepcopy(trajectory), trajectory[:]):
        assert found[0]["tokens"]["completion_mask"] == [0, 1, 1]
        assert weights(found) == [[0, 1, 1], [1, 1]]
        assert sum(build_samples([found], "tree").samples[0].records.weight) == 4
    assert weights(pickle.loads(pickle.dumps(trajectory))) == [[0, 1, 1], [1, 1]]
    assert weights(copy.deepcopy(list(trajectory))) == [[0, 1, 1], [1, 1]]


@pytest.mark.parametrize("make", MAKERS)
def test_every_list_and_every_reference_is_live(make: Any) -> None:
    trajectory = make()
    tokens = trajectory[0]["tokens"]
    first, again = tokens["completion_mask"], tokens.get("completion_mask")
    assert first is again
    first[0], again[1] = 0, 0
    for key, value in tokens.items():
        if key == "completion_logprobs":
            value[2] = -2.0
    dict(tokens)["prompt_ids"][0] = 9
    random.Random(0).shuffle(tokens["prompt_mask"])
    assert tokens["prompt_ids"] == [9, 2]
    assert set(tokens.assigned) == {"completion_mask", "completion_logprobs", "prompt_ids"}
    sample = build_samples([trajectory], "step").samples[0]
    assert sample.ids.tolist()[:2] == [9, 2]
    assert sample.records.weight.tolist() == [0, 0, 1]
    assert sample.records.logprob[2] == -2.0


@pytest.mark.parametrize("make", MAKERS)
def test_reading_changes_nothing_and_undone_edits_are_none(make: Any) -> None:
    trajectory = make()
    before = build_samples([trajectory], "tree").samples[0]
    tokens = trajectory[1]["tokens"]
    assert [list(value) for value in tokens.values()]
    tokens["completion_mask"][0] = 0
    assert not tokens.as_recorded
    tokens["completion_mask"][0] = 1
    assert tokens.as_recorded
    assert tokens.assigned == ()
    after = build_samples([trajectory], "tree").samples[0]
    assert after.ids.tolist() == before.ids.tolist()
    assert after.info["streams"].keys() == before.info["streams"].keys()


def test_lists_of_a_step_made_by_hand_stay_the_authors() -> None:
    step = plain_step([1, 2], [3, 4, 5])
    mask = step["tokens"]["completion_mask"]
    trajectory = Trajectory([step])
    mask[1] = 0
    assert trajectory[0]["tokens"]["completion_mask"] is mask
    assert weights(trajectory) == [[1, 0, 1]]


TAKEN: dict[str, Callable[[Trajectory, Any], Any]] = {
    "appended": lambda trajectory, step: trajectory.append(step),
    "extended": lambda trajectory, step: trajectory.extend([step]),
    "inserted": lambda trajectory, step: trajectory.insert(0, step),
    "assigned": lambda trajectory, step: trajectory.__setitem__(slice(None), [step]),
}


@pytest.mark.parametrize("take", list(TAKEN))
def test_the_dict_of_a_step_made_by_hand_stays_the_authors(take: str) -> None:
    step = plain_step([1, 2], [3, 4, 5])
    tokens: Any = step["tokens"]
    trajectory = Trajectory()
    TAKEN[take](trajectory, step)
    assert trajectory[0]["tokens"].as_recorded
    tokens["completion_mask"] = [1, 0, 0]
    for found in (trajectory, stored(trajectory), copy.deepcopy(trajectory), trajectory[:]):
        assert weights(found) == [[1, 0, 0]]
        assert found[0]["tokens"]["completion_mask"] == [1, 0, 0]
    assert weights(pickle.loads(pickle.dumps(trajectory))) == [[1, 0, 0]]
    trajectory[0]["tokens"]["completion_mask"] = [0, 1, 1]  # the later assignment counts
    assert weights(trajectory) == [[0, 1, 1]]
    tokens["completion_mask"] = [0, 0, 1]
    assert weights(trajectory) == [[0, 0, 1]]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("key", ["completion_mask", "completion_logprobs", "completion_ids"])
def test_a_list_that_no_longer_fits_is_refused(make: Any, key: str) -> None:
    trajectory = make()
    trajectory[1]["tokens"][key].append(1)
    with pytest.raises(TokenError, match="step 1 of rollout 0"):
        build_samples([trajectory])


def test_a_call_that_becomes_longer_is_trained_so() -> None:
    trajectory = recorded()
    tokens = trajectory[1]["tokens"]
    tokens["completion_ids"].append(9)
    tokens["completion_mask"].append(1)
    tokens["completion_logprobs"].append(-1.0)
    for found in (trajectory, stored(trajectory)):
        last = build_samples([found], "step").samples[1]
        assert last.ids.tolist()[-1] == 9
        assert last.records.logprob[-1] == -1.0


def test_messages_that_are_edited_in_place_reach_the_store() -> None:
    trajectory, _ = talk(3)
    trajectory[1]["completion"].append({"role": "user", "content": "noted"})
    trajectory[0]["prompt"][0]["content"] = "edited"
    found = stored(trajectory)
    assert found[1]["completion"][-1]["content"] == "noted"
    assert [step["prompt"][0]["content"] for step in found] == ["edited"] * 3
    assert [step["prompt"] for step in found] == [step["prompt"] for step in trajectory]


def response_edits() -> dict[str, Callable[[Any], Any]]:
    return {
        "ids": lambda r: r.choices[0].token_ids.append(1),
        "prompt ids": lambda r: r.prompt_token_ids.__setitem__(0, 1),
        "logprobs": lambda r: r.choices[0].logprobs.token_logprobs.clear(),
        "one logprob": lambda r: setattr(r.choices[0].logprobs.content[0], "logprob", 0.0),
        "usage": lambda r: setattr(r.usage, "prompt_tokens", 0),
        "finish reason": lambda r: setattr(r.choices[0], "finish_reason", "stop"),
        "choices": lambda r: r.choices.pop(),
        "tool calls": lambda r: r.choices[0].message.tool_calls.pop(),
        "arguments": lambda r: setattr(
            r.choices[0].message.tool_calls[0].function, "arguments", "{}"
        ),
    }


@pytest.mark.parametrize("name", list(response_edits()))
def test_an_edit_of_a_response_takes_effect_or_raises(name: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{1"}}
    message = {"role": "assistant", "content": "hi", "tool_calls": [call]}
    response = make_response([1, 2], [3], 7, message=message)
    before = response.model_dump()
    with pytest.raises((TypeError, AttributeError)):
        response_edits()[name](response)
    assert response.model_dump() == before
    assert type(before["choices"][0]["token_ids"]) is list
    ids = list(response.choices[0].token_ids or ())
    ids.append(4)
    assert copy.deepcopy(response.choices[0].token_ids) == [3]
    response.choices[0].message.content = "edited"
    assert response.choices[0].message.content == "edited"
