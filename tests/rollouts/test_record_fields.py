"""Every field of a model call reaches the store and comes back, or is listed here as one that does
not: a new field of `ModelResponse` that is neither in the token tree nor kept fails."""

from dataclasses import fields

import numpy as np
import pytest

from rolltree.rollouts.decode import decode_rollout
from rolltree.rollouts.record import encode_result
from rolltree.tokens import Trajectory
from rolltree.values.openai_shape import same_value
from rolltree.values.types import (
    FinishReason,
    ModelResponse,
    RolloutRequest,
    RolloutResult,
    State,
)

VALUES = {
    "message": {"role": "assistant", "content": "ab"},
    "text": "ab<stop>",
    "finish_reason": FinishReason.LENGTH,
    "prompt_ids": np.array([5, 6, 7], np.int32),
    "completion_ids": np.array([8, 9], np.int32),
    "logprobs": np.array([-0.5, -0.25], np.float32),
    "versions": np.array([3, 4], np.int32),
    "temperature": 0.75,
    "call_id": 123456,
    "extends": 123455,
    "raw": None,
    "num_prompt_tokens": 3,
    "num_completion_tokens": 2,
    "wait_s": 1.5,
    "sent_s": 2.5,
    "time_s": 3.5,
    "info": {"num_retries": 1},
    "id": "chatcmpl-1",
    "model": "m",
    "routed_experts": np.arange(8).reshape(4, 1, 2),
}
NOT_STORED = {
    "raw": "the object of another client, which is kept instead of the record",
    "extends": "a hint for the tree, which knows the answer when the call is in it",
    "tree": "where the call lies in this process",
    "call": "where the call lies in this process",
    "routed_experts": "a stream of the tree, which training reads there",
}


def test_no_field_of_a_call_is_lost_between_the_answer_and_the_store():
    names = {field.name for field in fields(ModelResponse)}
    known = VALUES.keys() | NOT_STORED.keys()
    assert known == names, (
        "a new field of ModelResponse also stands in tokens.step.KeptResponse; give it a value in "
        "VALUES that is not its default, or a reason in NOT_STORED"
    )
    response = ModelResponse(**VALUES)
    trajectory = Trajectory()
    prompt = [{"role": "user", "content": "?"}]
    trajectory.append_call(prompt=prompt, completion=[response.message], response=response)
    request = RolloutRequest(
        "r", "env", {"prompt": prompt, "example_id": 0, "task": "t"}, 0, 0, "g", 0
    )
    state = State(input=dict(request.input), trajectory=trajectory)
    (row,) = encode_result(RolloutResult(request, (state,), None))
    (found,) = decode_rollout(row).states
    for back in (found["trajectory"][0]["response"], trajectory[0]["response"]):
        for name in names - NOT_STORED.keys():
            assert same_value(getattr(back, name), VALUES[name]), name
    stored = found["trajectory"]
    assert (
        stored.tree.stream("routed_experts", 0).values.tolist() == VALUES["routed_experts"].tolist()
    )


@pytest.mark.parametrize("name", sorted(VALUES))
def test_the_values_are_not_the_defaults(name):
    """A default would come back although nothing stored it."""
    (field,) = [each for each in fields(ModelResponse) if each.name == name]
    if name not in NOT_STORED:
        assert not same_value(field.default, VALUES[name])
