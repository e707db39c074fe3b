"""A scripted model and small worlds, for tests of environments."""

import asyncio
import itertools
import json

import numpy as np

from rolltree.environments import MultiTurnEnv, SingleTurnEnv, stop
from rolltree.environments.rubrics import Rubric, run_inline
from rolltree.values.types import FinishReason, ModelResponse, RolloutRequest, SamplingParams

_ids = itertools.count()
ROWS = [{"question": f"say {word}", "answer": word} for word in ("one", "two", "three")]


class ScriptedModel:
    """Turn i of a conversation is answered with `replies[i]`, the last one again and again.

    A reply is a text, a message, an exception to raise, or a function of the messages that returns
    one of these. With `tokens` every call has ids: the bytes of the conversation.
    """

    model = "scripted"

    def __init__(self, *replies, tokens=True, delay_s=0.0, wait_s=0.0):
        self.replies = replies or ("ok",)
        self.tokens, self.delay_s, self.wait_s = tokens, delay_s, wait_s
        self.calls = []
        self.sessions = 0

    def session(self):
        self.sessions += 1
        return self

    async def chat(self, messages, *, tools=None, sampling=None, model=None, message_type="chat"):
        self.calls.append(
            {
                "messages": messages if isinstance(messages, str) else list(messages),
                "tools": tools,
                "sampling": sampling or SamplingParams(),
                "model": model,
                "message_type": message_type,
            }
        )
        await asyncio.sleep(self.delay_s)
        turn = 0
        if not isinstance(messages, str):
            turn = sum(message["role"] == "assistant" for message in messages)
        reply = self.replies[min(turn, len(self.replies) - 1)]
        if callable(reply) and not isinstance(reply, Exception):
            reply = reply(messages)
        if isinstance(reply, Exception):
            raise reply
        message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
        text = message.get("content") or ""
        prompt_ids = np.frombuffer(json.dumps(messages).encode(), np.uint8).astype(np.int32)
        ids = np.frombuffer(text.encode() or b".", np.uint8).astype(np.int32)
        return ModelResponse(
            message=message,
            text=text,
            finish_reason=FinishReason.STOP,
            prompt_ids=prompt_ids if self.tokens else None,
            completion_ids=ids if self.tokens else None,
            logprobs=np.full(len(ids), -0.5, np.float32) if self.tokens else None,
            versions=np.zeros(len(ids), np.int32) if self.tokens else None,
            temperature=1.0,
            call_id=next(_ids),
            num_prompt_tokens=len(prompt_ids),
            num_completion_tokens=len(ids),
            wait_s=self.wait_s,
        )

    async def generate(self, request):
        raise NotImplementedError

    async def aclose(self):
        raise AssertionError("the environment does not own the client")


@run_inline
def exact(completion, answer):
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    return float(bool(said) and said[-1] == answer)


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


class Echo(MultiTurnEnv):
    """Repeats what the model said; the model has won when it says the answer."""

    def __init__(self, **settings):
        super().__init__(**{"dataset": ROWS, "rubric": Rubric([exact]), **settings})

    @stop
    async def won(self, state):
        steps = state["trajectory"]
        return bool(steps) and steps[-1]["completion"][0]["content"] == state["answer"]

    async def env_response(self, messages, state):
        return user(f"not {messages[-1]['content']}")


def single(**settings):
    return SingleTurnEnv(**{"dataset": ROWS, "rubric": Rubric([exact]), **settings})


def a_request(env, index=0, **more):
    fields = {
        "request_id": f"r{index}",
        "env_id": env.env_id,
        "input": env.example("eval", 0),
        "seed": 11,
        "sampling_seed": 22,
        "group_id": "g",
        "index_in_group": index,
    }
    return RolloutRequest(**{**fields, **more})
