"""What environments written for verifiers read from responses, on every client."""

import inspect
import json

import pytest

from rolltree.inference import OpenAIClient
from rolltree.testing import ScriptedServer
from rolltree.verifiers import verifiers as vf

MAX_TOKENS = 6


class Reading(vf.MultiTurnEnv):
    """Two turns; it looks at every response as code for OpenAI's does."""

    def __init__(self, **kwargs):
        rows = [{"question": f"Say {n}.", "answer": str(n)} for n in range(2)]
        self.seen = []
        super().__init__(dataset=rows, rubric=vf.Rubric([num_words]), max_turns=2, **kwargs)

    async def get_model_response(self, *args, **kwargs):
        response = await super().get_model_response(*args, **kwargs)
        self.seen.append(response)
        return response

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "again"}]


def num_words(state):
    choices = [step["response"].choices[0] for step in state["trajectory"]]
    return float(sum(len((choice.message.content or "").split()) for choice in choices))


@pytest.fixture(scope="module", params=["embedded", "server", "AsyncOpenAI", "OpenAI"])
def make_client(request):
    if request.param == "embedded":
        local = pytest.importorskip("rolltree.inference.local")
        from rolltree.inference.models import load_model

        model, tokenizer = load_model("tiny")
        yield lambda: local.local_client(model, tokenizer, name="tiny", max_context=256)
        return
    with ScriptedServer(lambda request: "seven words", model="tiny") as server:
        if request.param == "server":
            yield lambda: OpenAIClient(server.base_url, "tiny")
        else:
            openai = pytest.importorskip("openai")
            kind = getattr(openai, request.param)
            yield lambda: kind(base_url=server.base_url, api_key="none")


async def played(make_client, env, **sampling_args):
    client = make_client()
    args = {"max_tokens": MAX_TOKENS, **sampling_args}
    try:
        results = await env.generate(env.dataset, client, "tiny", args, use_tqdm=False)
    finally:
        closed = (getattr(client, "aclose", None) or client.close)()
        if inspect.isawaitable(closed):
            await closed
    assert results.num_failed == 0
    return results


async def test_a_response_reads_like_openais(make_client):
    env = Reading()
    results = await played(make_client, env, logprobs=True, extra_body={"return_token_ids": True})
    steps = [step for state in results["state"] for step in state["trajectory"]]
    assert len(steps) == 4
    for response in [*(step["response"] for step in steps), *env.seen]:
        choice = response.choices[0]
        assert choice.index == 0
        assert choice.finish_reason in ("stop", "length")
        assert isinstance(choice.message.content, str)
        assert choice.message.role == "assistant"
        assert choice.message.tool_calls is None
        assert choice.message.model_dump()["content"] == choice.message.content
        assert response.usage.total_tokens == (
            response.usage.prompt_tokens + response.usage.completion_tokens
        )
        assert len(choice.logprobs.content) == len(choice.token_ids) > 0
        assert all(token.logprob <= 0.0 for token in choice.logprobs.content)
        assert response.prompt_token_ids
        assert response.object == "chat.completion"
        assert isinstance(response.created, int)
        dumped = response.model_dump()
        assert dumped["choices"][0]["message"]["content"] == choice.message.content
        assert dumped == response.model_dump(mode="json")
        assert json.loads(response.model_dump_json())["id"] == response.id
        assert response.to_dict()["choices"][0]["finish_reason"] == choice.finish_reason
        assert choice.model_dump()["message"]["role"] == "assistant"
        tokens = await vf.parse_response_tokens(response, "chat")
        assert tokens["completion_ids"] == list(choice.token_ids)
        (message,) = await vf.parse_response_messages(response, "chat")
        assert message["content"] == choice.message.content
    assert [list(step["response"].choices[0].token_ids) for step in steps] == [
        list(step["tokens"]["completion_ids"]) for step in steps
    ]


class Editing(Reading):
    """Changes what the model said before it becomes part of the conversation."""

    async def get_model_response(self, *args, **kwargs):
        response = await super().get_model_response(*args, **kwargs)
        response.choices[0].message.content = "edited"
        return response


async def test_a_changed_message_is_what_the_conversation_has(make_client):
    results = await played(make_client, Editing())
    for state in results["state"]:
        assert [m["content"] for m in state["completion"]] == ["edited", "again", "edited"]
        first, second = (step["tokens"] for step in state["trajectory"])
        if second is not None:  # what was sampled stays, and the next prompt does not go on from it
            known = [*first["prompt_ids"], *first["completion_ids"]]
            assert list(second["prompt_ids"])[: len(known)] != known


async def test_a_rollout_played_by_hand(make_client):
    client = make_client()
    env = Reading()
    (row,) = env.get_eval_inputs(1)
    try:
        state = await env.rollout(row, client, "tiny", {"max_tokens": MAX_TOKENS})
        await env.rubric.score_group([state])
    finally:
        closed = (getattr(client, "aclose", None) or client.close)()
        if inspect.isawaitable(closed):
            await closed
    assert len(state["trajectory"]) == 2
    assert state["reward"] == num_words(state)
