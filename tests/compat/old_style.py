"""Environments as one wrote them for verifiers 0.1.8. The tests run this file as it is, and with
its import line changed to `import rolltree as vf`; verifiers itself can run it too.

    python tests/compat/old_style.py BASE_URL      prints the rewards as JSON
"""

import asyncio
import json
import re
import sys
from types import SimpleNamespace

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI


def say(text):
    """Return a question that the scripted model answers with `text`."""
    return f"Reply with: {text}"


def tagged():
    parser = vf.XMLParser(["think", ("answer", "result")], answer_field="answer")

    def correct(parser, completion, answer, **kwargs):
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    rubric = vf.Rubric(funcs=[correct], weights=[2.0], parser=parser)
    rubric.add_reward_func(parser.get_format_reward_func(), weight=0.5)
    rows = [
        {"question": say("<think>\nx\n</think>\n<answer>\n4\n</answer>"), "answer": "4"},
        {"question": say("<answer>\n5\n</answer>"), "answer": "4"},
        {"question": say("<think>\nx\n</think>\n<answer>\n5\n</answer>"), "answer": "4"},
    ]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        system_prompt="Use tags.",
        few_shot=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
        parser=parser,
        rubric=rubric,
        max_workers=4,
    )


class Countdown(vf.MultiTurnEnv):
    """Says the next number until zero; the model repeats it."""

    def __init__(self, start=3, **kwargs):
        super().__init__(**kwargs)
        self.start = start
        self.closed = []

    async def setup_state(self, state, **kwargs):
        state["left"] = self.start - state["info"].get("less", 0)
        return await super().setup_state(state, **kwargs)

    @vf.stop(priority=5)
    async def at_zero(self, state: vf.State) -> bool:
        return state["left"] <= 0

    @vf.cleanup
    async def close(self, state: vf.State):
        self.closed.append(state["example_id"])
        state["closed"] = True

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        assert isinstance(messages, list)
        self.logger.debug("turn %d", len(state["trajectory"]))
        state["left"] -= 1
        return [{"role": "user", "content": say(str(state["left"]))}]


def countdown():
    def turns(state):
        return len([m for m in state["completion"] if m["role"] == "assistant"])

    async def left(state, info) -> float:
        return state["left"] + 10 * info["less"]

    def was_closed(state):
        return float(state["closed"])

    rows = [
        {"prompt": [{"role": "user", "content": say("go")}], "info": {"less": 0}, "answer": ""},
        {"prompt": [{"role": "user", "content": say("go")}], "info": {"less": 1}, "answer": ""},
    ]
    rubric = vf.Rubric(funcs=[left, was_closed])
    rubric.add_reward_func(turns, weight=0.0)
    return Countdown(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=2)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def fail(reason: str) -> str:
    """Raise."""
    raise ValueError(f"failed for {reason}")


class LoggedTools(vf.ToolEnv):
    async def call_tool(self, tool_name, tool_args, tool_call_id, **kwargs) -> vf.Message:
        message = await super().call_tool(tool_name, tool_args, tool_call_id, **kwargs)
        return {**message, "content": f"[{tool_name}] {message['content']}"}


def tools():
    def last_words(completion, answer):
        return float(completion[-1]["content"] == answer)

    rubric = vf.RubricGroup([vf.Rubric(funcs=[last_words]), vf.ToolRubric(tools=[add, fail])])
    rows = [
        {"question": 'Call add {"a": 2, "b": 3}', "answer": "Seen: [add] 5"},
        {"question": 'Call fail {"reason": "fun"}', "answer": "Seen: [fail] failed for fun"},
        {"question": say("no tool"), "answer": "no tool"},
    ]
    return LoggedTools(tools=[add, fail], dataset=Dataset.from_list(rows), rubric=rubric)


class Purse(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_tool(self.spend, args_to_skip=["purse"])

    async def setup_state(self, state, **kwargs):
        state["purse"] = [10]
        return state

    async def spend(self, amount: int, purse: list[int]) -> str:
        """Spend coins.

        Args:
            amount: How many.
        """
        purse[0] -= amount
        return str(purse[0])

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "purse": state["purse"]}


def purse():
    def coins(state):
        return float(state["purse"][0])

    rows = [{"question": 'Call spend {"amount": 3}', "answer": "7"}]
    return Purse(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[coins]))


class FakeJudge:
    """A client as a test double: plain objects, and a `create` that is not asynchronous."""

    def __init__(self):
        self.chat = SimpleNamespace(completions=self)
        self.asked = []

    def create(self, model, messages, **kwargs):
        self.asked.append(model)
        response = messages[-1]["content"].rpartition("Response:")[2]
        message = SimpleNamespace(content="yes" if "blue" in response else "no")
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def judged():
    rubric = vf.JudgeRubric(judge_client=FakeJudge(), judge_model="judge")

    async def agrees(judge, prompt, completion, answer, state, **kwargs):
        reply = await judge(prompt, completion, answer, state)
        return 1.0 if "yes" in reply.lower() else 0.0

    async def cached(judge, judge_model, prompt, completion, answer, state) -> float:
        await judge(prompt, completion, answer, state)
        return 0.25 * (len(state["judge_response"]) == 1 and judge_model == "judge")

    rubric.add_reward_func(agrees)
    rubric.add_reward_func(cached)
    rows = [
        {"question": say("It is blue."), "answer": "blue"},
        {"question": say("It is red."), "answer": "blue"},
    ]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)


class LastNumber(vf.Parser):
    def parse(self, text: str):
        found = re.findall(r"-?\d+", text)
        return found[-1] if found else None


class Bonus(vf.Rubric):
    """Scores as usual and adds what a subclass of 0.1.8 would."""

    async def score_rollout(self, state, score_sem):
        await super().score_rollout(state, score_sem=score_sem)
        state["reward"] += 1.0

    async def score_group(self, states, score_sem):
        await super().score_group(states, score_sem=score_sem)
        for state in states:
            state["reward"] += 1.0


def numbers():
    parser = LastNumber()

    def same(parser, completion, answer):
        return float(parser.parse_answer(completion) == answer)

    rows = [
        {"question": say("1, 2, 3"), "answer": "3"},
        {"question": say("none"), "answer": "3"},
    ]
    rubric = Bonus(funcs=[same], parser=parser)
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), parser=parser, rubric=rubric)


def ranked():
    def rank(completions, **kwargs) -> list[float]:
        sizes = [len(completion[-1]["content"]) for completion in completions]
        return [float(sum(size > other for other in sizes)) for size in sizes]

    rows = [
        {"question": say("a"), "answer": "", "example_id": 0},
        {"question": say("abc"), "answer": "", "example_id": 0},
        {"question": say("ab"), "answer": "", "example_id": 0},
    ]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[rank]))


class Simulated(vf.MultiTurnEnv):
    """The user is played by the rollout's own model."""

    async def env_response(self, messages, state, **kwargs):
        reply = await state["client"].chat.completions.create(
            model=state["model"], messages=[{"role": "user", "content": say("user words")}]
        )
        return [{"role": "user", "content": say(f"heard {reply.choices[0].message.content}")}]


def simulated():
    def heard(completion):
        return float(completion[-1]["content"] == "heard user words")

    rows = [{"question": say("start"), "answer": ""}]
    rubric = vf.Rubric(funcs=[heard])
    return Simulated(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=2)


class OwnCall(vf.SingleTurnEnv):
    """Asks the client itself, as environments with special requests did."""

    async def get_model_response(
        self,
        client,
        model,
        prompt,
        oai_tools=None,
        sampling_args=None,
        message_type=None,
        **kwargs,
    ):
        longer = [*prompt, {"role": "user", "content": say("own call")}]
        return await client.chat.completions.create(model=model, messages=longer)


def own_call():
    def own(completion):
        return float(completion[-1]["content"] == "own call")

    rows = [{"question": say("other"), "answer": ""}]
    return OwnCall(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[own]))


def thinking():
    parser = vf.ThinkParser(extract_fn=vf.extract_boxed_answer)

    def correct(parser, completion, answer):
        return float(parser.parse_answer(completion) == answer)

    rows = [
        {"question": say("<think>hm</think> so \\boxed{\\frac{1}{2}}"), "answer": "\\frac{1}{2}"},
        {"question": say("\\boxed{1}"), "answer": "1"},
    ]
    rubric = vf.Rubric(funcs=[correct, parser.get_format_reward_func()], parser=parser)
    return vf.SingleTurnEnv(eval_dataset=Dataset.from_list(rows), parser=parser, rubric=rubric)


def grouped():
    return vf.EnvGroup([tagged(), numbers()], env_names=["tagged", "numbers"])


MAKERS = {
    maker.__name__: maker
    for maker in (
        *(tagged, countdown, tools, purse, judged, numbers),
        *(ranked, simulated, own_call, thinking, grouped),
    )
}


def load_environment(name="tagged"):
    return MAKERS[name]()


async def play(name, base_url):
    """Return reward, turns and answers of every rollout of one environment."""
    env = load_environment(name)
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    async with client:
        outputs = await env.evaluate(client, "scripted", {"max_tokens": 200}, max_concurrent=4)
    average = outputs["metadata"]["avg_reward"]
    return {
        "reward": outputs["reward"],
        "average": round(average, 9),
        "example_id": outputs["example_id"],
        "turns": [len(state["trajectory"]) for state in outputs["state"]],
        "completed": [state["is_completed"] for state in outputs["state"]],
    }


if __name__ == "__main__":
    found = {name: asyncio.run(play(name, sys.argv[1])) for name in MAKERS}
    print(json.dumps(found))
