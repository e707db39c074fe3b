"""A rollout source and a model client without any model, for tests of the engine."""

import asyncio
import itertools

import numpy as np

from rolltree.rollouts import current_episode
from rolltree.values.types import ErrorRecord, FinishReason, ModelResponse, RolloutRequest, State

_ids = itertools.count()


def a_generation(text="hi", wait_s=0.0):
    return ModelResponse(
        message={"role": "assistant", "content": text},
        text=text,
        finish_reason=FinishReason.STOP,
        prompt_ids=np.array([1, 2], np.int32),
        completion_ids=np.array([3], np.int32),
        logprobs=np.array([-0.5], np.float32),
        versions=None,
        temperature=1.0,
        call_id=next(_ids),
        wait_s=wait_s,
    )


class Model:
    """Answers "hi" after `delay_s`, of which it claims to have waited `wait_s`."""

    model = "scripted"

    def __init__(self, delay_s=0.0, wait_s=0.0):
        self.delay_s, self.wait_s = delay_s, wait_s
        self.models = []

    def session(self):
        return self

    async def chat(self, messages, *, model=None, **settings):
        self.models.append(model)
        await asyncio.sleep(self.delay_s)
        return a_generation(wait_s=self.wait_s)

    async def generate(self, request):
        await asyncio.sleep(self.delay_s)
        return a_generation(wait_s=self.wait_s)

    async def aclose(self):
        raise AssertionError("the engine does not own the client")


class Source:
    """Plays an episode with `play(request, client, state)`, a plain or a coroutine function."""

    env_id = "scripted"

    def __init__(self, play=None, num=100):
        self.play = play
        self.num = num
        self.running = self.most_running = 0
        self.started, self.cancelled, self.cleaned = [], [], []

    def num_examples(self, split):
        return self.num

    def example(self, split, index):
        return {
            "prompt": [{"role": "user", "content": f"{split} {index}"}],
            "example_id": index,
            "task": "t",
        }

    async def run_request(self, request, client):
        self.started.append(request.request_id)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        state = State(input=dict(request.input), trajectory=[], reward=None, error=None)
        current_episode().states.append(state)
        try:
            await asyncio.sleep(0)
            if self.play is not None:
                result = self.play(request, client, state)
                if asyncio.iscoroutine(result):
                    await result
            if state["error"] is None:
                state["reward"] = 1.0
            return [state]
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running -= 1
            self.cleaned.append(request.request_id)


def failed(kind="EngineError", phase="model"):
    return ErrorRecord(kind, "it failed", "Traceback", phase)


def a_request(index=0, group="g", **more):
    fields = {
        "request_id": f"r{index}",
        "env_id": "scripted",
        "input": {"prompt": "p", "example_id": index, "task": "t"},
        "seed": 1,
        "sampling_seed": index,
        "group_id": group,
        "index_in_group": index,
    }
    return RolloutRequest(**{**fields, **more})
