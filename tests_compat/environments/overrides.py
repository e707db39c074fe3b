"""Environments that override what is not a hook, and rewards that use the process they run in."""

import asyncio
import contextvars
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

import verifiers as vf
from datasets import Dataset
from pydantic import BaseModel
from verifiers.utils.async_utils import maybe_await

VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")
LOCK = asyncio.Lock()
POOL = ThreadPoolExecutor(2)


def sums(num=4):
    return Dataset.from_list(
        [{"question": f"What is {n} plus {n + 3}?", "answer": str(2 * n + 3)} for n in range(num)]
    )


def right(completion, answer):
    return float(answer in completion[-1]["content"])


class Direct(vf.Environment):
    """A plain Environment with a loop of its own."""

    async def setup_state(self, state):
        state["own"] = 1
        return state

    async def rollout(self, input, client, model, sampling_args=None):
        state = await self.init_state(input, client, model, sampling_args)
        state = await self.setup_state(state)
        response = await self.get_model_response(
            client, model, state["prompt"], sampling_args=sampling_args
        )
        text = response.choices[0].message.content or ""
        said = [{"role": "assistant", "content": text}]
        state["trajectory"].append(
            {
                "prompt": state["prompt"],
                "completion": said,
                "response": response,
                "tokens": None,
                "reward": None,
                "advantage": None,
                "extras": {"mine": True},
            }
        )
        state["completion"] = [*said, {"role": "user", "content": "end"}]
        state["is_completed"] = True
        return state


def direct():
    return Direct(dataset=sums(), rubric=vf.Rubric(funcs=[right]))


class Around(vf.SingleTurnEnv):
    """Calls super() everywhere and adds."""

    def __init__(self, extra, **kwargs):
        self.extra = extra
        self.seen = []
        rubric = vf.Rubric(funcs=[self.reward, self.async_reward], weights=[1.0, 0.5])
        super().__init__(dataset=sums(), rubric=rubric, **kwargs)
        self.rubric.add_reward_func(right, weight=0.0)
        self.dataset = self.dataset.map(lambda row: {"level": len(row["question"])})

    def reward(self, completion, **kwargs):
        return float(len(kwargs["state"]["notes"]))

    async def async_reward(self, state, info):
        return self.extra + len(info)

    async def rollout(self, input, client, model, sampling_args=None):
        state = await super().rollout(input, client, model, sampling_args)
        state["notes"] = ["rollout", input["level"]]
        state["completion"] = [*state["completion"], {"role": "user", "content": "added"}]
        return state

    async def run_rollout(self, sem, input, client, model, sampling_args=None):
        state = await super().run_rollout(sem, input, client, model, sampling_args)
        state["notes"].append("run_rollout")
        return state

    async def _render_completion(self, state):
        await super()._render_completion(state)
        state["rendered"] = len(state["completion"])

    async def _cleanup(self, state):
        state["cleaned"] = True
        await super()._cleanup(state)

    async def generate(self, inputs, client, model, **kwargs):
        results = await super().generate(inputs, client, model, **kwargs)
        results["metadata"]["sampling_args"] = {"own": 1}
        for state in results["state"]:
            state["generated"] = True
        return results


def around():
    return Around(extra=2.0)


class Deep(vf.MultiTurnEnv):
    """Rewards every step itself, and keeps messages by reference."""

    async def env_response(self, messages, state, **kwargs):
        step = state["trajectory"][-1]
        step["reward"] = 0.25
        step["advantage"] = 1.5
        step["extras"]["seen"] = len(messages)
        state["last"] = messages[-1]
        state["nested"] = {"a": [1, (2, 3)], "none": None, "set": {1}}
        state["trajectory"][-1]["completion"][-1]["name"] = "model"
        return [{"role": "user", "content": "again", "name": "env"}]


def deep():
    return Deep(dataset=sums(), rubric=vf.Rubric(funcs=[right]), max_turns=3)


class Old(vf.MultiTurnEnv):
    """is_completed and env_response of the version before: not supported by 0.1.8 either."""

    async def is_completed(self, messages, state, **kwargs):
        return len(state["responses"]) == 1

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "x"}], state


def old():
    return Old(dataset=sums(2), rubric=vf.Rubric(funcs=[right]), max_turns=3)


class OldAnswer(vf.MultiTurnEnv):
    """An env_response that returns the state, too."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "x"}], state


class SyncHooks(vf.MultiTurnEnv):
    """Hooks without async."""

    def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "x"}]


def sync_hooks():
    return SyncHooks(dataset=sums(2), rubric=vf.Rubric(funcs=[right]), max_turns=2)


class SyncStop(vf.MultiTurnEnv):
    """A stop condition without async."""

    @vf.stop
    def enough(self, state):
        return len(state["trajectory"]) >= 1

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "x"}]


def sync_stop():
    return SyncStop(dataset=sums(2), rubric=vf.Rubric(funcs=[right]), max_turns=3)


class Unfinished(vf.MultiTurnEnv):
    """Abstract: has no env_response."""


def unfinished():
    return Unfinished(dataset=sums(2))


def with_alarm(completion):
    """As math checkers do it: works in the main thread only."""

    def ring(number, frame):
        raise TimeoutError("late")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(5)
    try:
        return 1.0
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def in_main_thread(completion):
    return float(threading.current_thread() is threading.main_thread())


async def in_thread(completion):
    return await asyncio.to_thread(len, completion)


async def in_pool(completion):
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(POOL, len, completion)


def runs_a_loop(completion):
    async def one():
        return 1.0

    return asyncio.run(one())


async def locked(completion, state):
    async with LOCK:
        await asyncio.sleep(0)
        return 1.0


async def awaits(state):
    return await maybe_await(lambda: 2.0)


def drawn(state):
    random.seed(state["example_id"])
    return random.random()


async def slow(state):
    await asyncio.sleep(0.01)
    return 1.0


def blocking(state):
    time.sleep(0.001)
    return 1.0


def exits(completion):
    raise SystemExit("reward exits")


def process():
    funcs = [with_alarm, in_main_thread, in_thread, in_pool, runs_a_loop, locked, awaits, drawn]
    return vf.SingleTurnEnv(dataset=sums(), rubric=vf.Rubric(funcs=[*funcs, slow, blocking]))


class Shared(vf.MultiTurnEnv):
    """Uses threads, locks and executors of its own in its hooks."""

    def __init__(self, **kwargs):
        self.lock = asyncio.Lock()
        self.limit = asyncio.Semaphore(2)
        super().__init__(**kwargs)

    async def setup_state(self, state, **kwargs):
        async with self.limit:
            state["length"] = await asyncio.to_thread(len, state["prompt"])
        return await super().setup_state(state, **kwargs)

    async def env_response(self, messages, state, **kwargs):
        async with self.lock:
            parts = await asyncio.gather(*(self.part(n) for n in range(3)))
        return [{"role": "user", "content": " ".join(parts)}]

    async def part(self, number):
        await asyncio.sleep(0)
        return f"part {number}"


def shared():
    return Shared(dataset=sums(), rubric=vf.Rubric(funcs=[right]), max_turns=2)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Order(BaseModel):
    item: str
    count: int = 1


def paint(color: Color, times: int = 2) -> str:
    """Paint something.

    Args:
        color: The color.
    """
    return f"{color} {times}"


def buy(order: Order, urgent: bool = False) -> str:
    """Buy something."""
    return str(order)


def count(items: list[int], words: list[str] | None = None) -> int:
    """Count things."""
    return len(items) + len(words or [])


class Shop:
    def __init__(self):
        self.sold = 0

    def sell(self, amount: int) -> str:
        """Sell things.

        Args:
            amount: How many.
        """
        self.sold += 1
        return f"sold {amount}"

    @staticmethod
    def close(reason: str = "late") -> str:
        """Close."""
        return reason


def shop(kind_of="plain"):
    store = Shop()
    tools = [store.sell, Shop.close, count]
    if kind_of == "enum":
        tools.append(paint)
    if kind_of == "model":
        tools.append(buy)

    def called(completion, state):
        messages = [m for m in completion if m["role"] == "assistant" and m.get("tool_calls")]
        return float(sum(len(m["tool_calls"]) for m in messages))

    def first_name(completion):
        for message in completion:
            for call in message.get("tool_calls") or []:
                return float(len(call["function"]["name"]))
        return 0.0

    return vf.ToolEnv(
        tools=tools,
        dataset=sums(),
        rubric=vf.Rubric(funcs=[called, first_name]),
        max_turns=3,
        system_prompt="Use tools.",
    )


class AllHooks(vf.ToolEnv):
    """A ToolEnv that ends on a tool and adds to env_response."""

    def __init__(self, **kwargs):
        super().__init__(tools=[self.submit, self.look], **kwargs)

    async def setup_state(self, state):
        state["submitted"] = None
        return await super().setup_state(state)

    async def submit(self, answer: str) -> str:
        """Submit the answer."""
        return f"got {answer}"

    async def look(self, where: str = "here") -> str:
        """Look."""
        return f"nothing {where}"

    @vf.stop
    async def submitted(self, state):
        return state["submitted"] is not None

    async def env_response(self, messages, state, **kwargs):
        replies = await super().env_response(messages, state, **kwargs)
        for call in messages[-1]["tool_calls"]:
            if call["function"]["name"] == "submit":
                state["submitted"] = call["function"]["arguments"]
        return replies


def submits():
    def given(state):
        return float(state["submitted"] is not None)

    return AllHooks(dataset=sums(6), rubric=vf.Rubric(funcs=[given]), max_turns=4)


class Grouped(vf.MultiTurnEnv):
    """Does something for a whole group."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Again."}]

    async def run_group(self, *args, **kwargs):
        states = await super().run_group(*args, **kwargs)
        for state in states:
            state["members"] = len(states)
        return states


def grouped():
    return Grouped(dataset=sums(), rubric=vf.Rubric(funcs=[right]), max_turns=2)


class Pending(vf.Rubric):
    """A judge that has no answer for one group."""

    async def score_group(self, states, score_sem):
        if states[0]["example_id"] == 1:
            raise RuntimeError("no judge")
        await super().score_group(states, score_sem)


def pending():
    return vf.SingleTurnEnv(dataset=sums(), rubric=Pending(funcs=[right]))


class Nudged(vf.ToolEnv):
    """Counts the answers without a tool call, and goes on."""

    @vf.stop
    async def no_tools_called(self, state):
        if await super().no_tools_called(state):
            state["nudges"] = state.get("nudges", 0) + 1
        return False

    async def env_response(self, messages, state, **kwargs):
        if messages[-1].get("tool_calls"):
            return await super().env_response(messages, state, **kwargs)
        return [{"role": "user", "content": "Use a tool."}]


def nudged():
    return Nudged(tools=[shout], dataset=sums(6), rubric=vf.Rubric(funcs=[right]), max_turns=3)


def shout(text: str) -> str:
    """Shout."""
    return text.upper()


def load_environment(kind, **kwargs):
    return globals()[kind](**kwargs)
