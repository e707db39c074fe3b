"""`RecordedStep`: a step dict whose parts are built when they are read."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.tokens import RecordedStep, StepTokens, Trajectory, peek
from rolltree.values.types import FinishReason, ModelResponse

KEYS = ["prompt", "completion", "response", "tokens", "reward", "advantage", "extras"]


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def record(trajectory: Trajectory, prompt: Any, answer: str = "a", **more: Any) -> Any:
    """Record a call; its ids are one per message, or one per character of a text."""
    number = len(trajectory)
    text = isinstance(prompt, str)
    message = say("assistant", answer)
    response = ModelResponse(
        message=message,
        text=answer,
        finish_reason=FinishReason.LENGTH,
        prompt_ids=np.arange(len(prompt) + 1, dtype=np.int32),
        completion_ids=np.array([90, 91], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        versions=np.array([3, 4], np.int32),
        temperature=1 / 3,
        call_id=1000 + number,
        raw={"id": number},
    )
    return trajectory.append_call(
        prompt=prompt,
        completion=answer if text else [message],
        response=response,
        turn=number,
        **more,
    )


def talk(num_turns: int) -> tuple[Trajectory, list[Any]]:
    trajectory, prompts = Trajectory(), []
    prompt: list[Any] = [say("user", "q")]
    for turn in range(num_turns):
        prompts.append(list(prompt))
        record(trajectory, prompt, f"a{turn}")
        prompt = [*trajectory.conversation(), say("user", f"u{turn}")]  # type: ignore[list-item]
    return trajectory, prompts


EXTRAS = {
    "agent": "", "turn": 1, "call_id": 1001, "finish_reason": "length", "temperature": 1 / 3,
    "num_prompt_tokens": 4, "num_completion_tokens": 2,
    "policy_version_min": 3, "policy_version_max": 4,
}  # fmt: skip


def test_every_key_reads_as_in_a_plain_dict() -> None:
    trajectory, prompts = talk(3)
    step = trajectory[1]
    assert isinstance(step, RecordedStep)
    plain = {
        "prompt": prompts[1],
        "completion": [say("assistant", "a1")],
        "response": {"id": 1},
        "tokens": {
            "prompt_ids": [0, 1, 2, 3],
            "prompt_mask": [0] * 4,
            "completion_ids": [90, 91],
            "completion_mask": [1, 1],
            "completion_logprobs": [-0.5, -0.25],
        },
        "reward": None,
        "advantage": None,
        "extras": EXTRAS,
    }
    assert step == plain
    assert plain == step
    assert step != plain | {"reward": 1.0}
    assert list(step) == list(step.keys()) == KEYS
    assert len(step) == 7
    for copied in (dict(step), {**step}, step.copy(), step | {}, {} | step, copy.copy(step)):
        assert copied == plain
        assert list(copied) == KEYS
    assert json.loads(json.dumps({**step, "tokens": dict(step["tokens"])})) == plain
    assert json.loads(json.dumps(step)) == plain
    assert eval(repr(step)) == plain
    assert pickle.loads(pickle.dumps(step)) == plain
    assert next(iter(step.values())) == prompts[1]
    assert dict(step.items()) == plain
    assert (step.get("prompt"), step.get("nothing", 5)) == (prompts[1], 5)
    assert isinstance(step, dict)
    assert isinstance(step["tokens"], StepTokens)


def test_what_was_read_stays_and_can_be_changed_in_place() -> None:
    trajectory, _ = talk(2)
    step = trajectory[1]
    step["extras"]["note"] = 1
    step["prompt"].append(say("user", "more"))
    step["tokens"]["completion_mask"] = [1, 0]
    assert step["extras"]["note"] == 1
    assert step["prompt"][-1]["content"] == "more"
    assert step["tokens"]["completion_mask"] == [1, 0]
    assert trajectory[0]["prompt"] == [say("user", "q")]


def test_peek_keeps_nothing() -> None:
    trajectory, prompts = talk(3)
    step = trajectory[2]
    assert peek(step, "prompt") == prompts[2]
    assert peek(step, "prompt") is not peek(step, "prompt")
    assert peek(step, "extras")["turn"] == 2
    assert peek(step, "missing") is None
    assert step.has_own_tokens
    assert peek(step, "tokens").call == 2
    assert step.has_own_tokens
    assert step["prompt"] is step["prompt"] is peek(step, "prompt")
    assert peek({"prompt": "p"}, "prompt") == "p"


def test_a_message_is_kept_once_however_often_it_is_restated() -> None:
    trajectory = Trajectory()
    prompt = [say("user", "q")]
    record(trajectory, prompt)
    restated = [*copy.deepcopy(trajectory.conversation()), say("user", "u")]
    record(trajectory, restated)
    assert trajectory[1].head is trajectory[0]
    assert trajectory[1]["prompt"] == restated
    assert trajectory[1]["prompt"][0] is prompt[0]
    restated[0]["content"] = "edited later"
    assert trajectory[1]["prompt"][0]["content"] == "q"


def test_a_rewritten_history_starts_anew() -> None:
    trajectory, _ = talk(2)
    rewritten = [say("user", "summary"), say("user", "go on")]
    step = record(trajectory, rewritten)
    assert step.head is None
    assert step["prompt"] == rewritten
    assert step.new_messages(trajectory[1]) is None
    after = record(trajectory, [*trajectory.conversation(), say("user", "u")])
    assert after.head is step
    assert after.new_messages(step) == [say("user", "u")]


def test_a_changed_step_is_not_what_later_prompts_are_compared_with() -> None:
    trajectory, prompts = talk(2)
    trajectory[1]["completion"] = [say("assistant", "edited")]
    said = [*prompts[1], say("assistant", "edited")]
    assert trajectory[1].is_changed()
    assert trajectory.conversation() == said
    step = record(trajectory, [*said, say("user", "u")])
    assert step["prompt"] == [*said, say("user", "u")]
    assert step.head is None
    trajectory[1]["prompt"].clear()
    assert step["prompt"] == [*said, say("user", "u")]


def test_reading_does_not_count_as_a_change() -> None:
    trajectory, prompts = talk(2)
    assert (trajectory[1]["prompt"], trajectory[1]["completion"]) == (
        prompts[1],
        [say("assistant", "a1")],
    )
    step = record(trajectory, [*trajectory.conversation(), say("user", "u")])
    assert step.head is trajectory[1]
    assert step.new_messages(trajectory[1]) == [say("user", "u")]


def test_text_prompts_share_their_beginning() -> None:
    trajectory = Trajectory()
    record(trajectory, "once ", "upon")
    step = record(trajectory, "once upon a ", "time")
    assert step.head is trajectory[0]
    assert step._added == " a "
    assert (step["prompt"], step["completion"]) == ("once upon a ", "time")
    assert trajectory.conversation() == "once upon a time"
    assert record(trajectory, "other", "x").head is None


def test_caller_extras_win_and_a_call_without_versions_has_none() -> None:
    trajectory = Trajectory()
    step = record(trajectory, [say("user", "q")], extras={"turn": 9, "note": 1})
    assert (step["extras"]["turn"], step["extras"]["note"]) == (9, 1)
    bare = ModelResponse(
        message=say("assistant", "a"),
        text="a",
        finish_reason=FinishReason.STOP,
        prompt_ids=np.array([1], np.int32),
        completion_ids=np.array([2], np.int32),
        logprobs=None,
        versions=None,
        temperature=1.0,
        call_id=7,
    )
    step = trajectory.append_call(prompt="q", completion="a", response=bare)
    assert "policy_version_min" not in step["extras"]
    assert step["tokens"]["completion_ids"] == [2]


def test_keys_can_be_removed_and_set() -> None:
    trajectory, prompts = talk(2)
    step = trajectory[1]
    assert step.pop("prompt") == prompts[1]
    assert "prompt" not in step
    assert step.pop("prompt", None) is None
    assert peek(step, "prompt") is None
    with pytest.raises(KeyError):
        step.pop("prompt")
    assert step.setdefault("prompt", "new") == "new"
    assert step.is_changed()
    assert step.popitem() == ("prompt", "new")
    assert step.popitem() == ("extras", EXTRAS)
    while step:
        step.popitem()
    with pytest.raises(KeyError):
        step.popitem()


def test_copies_of_a_trajectory_have_their_own_tree() -> None:
    trajectory, prompts = talk(3)
    for copied in (copy.deepcopy(trajectory), pickle.loads(pickle.dumps(trajectory))):
        assert copied == trajectory
        assert copied.tree is not trajectory.tree
        assert [copied.call_of(index) for index in range(3)] == [0, 1, 2]
        assert [step["prompt"] for step in copied] == prompts
        record(copied, [*copied.conversation(), say("user", "u")])
        assert len(trajectory) == 3
        assert trajectory.tree.num_calls == 3
    part = trajectory[1:]
    assert part.tree is trajectory.tree
    assert part[0] is trajectory[1]
    assert part[0].has_own_tokens


def test_readers_that_bypass_python_fail_instead_of_losing_data() -> None:
    trajectory, _ = talk(1)
    with pytest.raises(TypeError):
        msgspec.json.encode(trajectory[0])
    assert json.loads(msgspec.json.encode(dict(trajectory[0]) | {"tokens": None}))["reward"] is None


def test_trimming_keeps_the_conversation() -> None:
    trajectory, _ = talk(2)
    said = trajectory.conversation()
    trajectory.trim()
    assert trajectory.conversation() == said
    assert record(trajectory, [*said, say("user", "u")]).head is trajectory[1]


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.sampled_from("xyz"), max_size=3))))
def test_any_history_reads_back_as_it_was_sent(turns: list[tuple[int, list[str]]]) -> None:
    trajectory, sent = Trajectory(), []
    prompt: list[Any] = [say("user", "q")]
    for dropped, new in turns:
        sent.append(list(prompt))
        record(trajectory, prompt)
        said: Any = trajectory.conversation()
        assert said == [*prompt, say("assistant", "a")]
        prompt = said[: max(1, len(said) - dropped)] + [say("user", text) for text in new]
    assert [peek(step, "prompt") for step in trajectory] == sent
    assert [step["prompt"] for step in copy.deepcopy(trajectory)] == sent
    assert [step["prompt"] for step in trajectory] == sent
