"""Environments with tools."""

import json
from typing import Any, Literal, Optional, TypedDict

import verifiers as vf
from datasets import Dataset


def rows(num=6):
    return Dataset.from_list(
        [{"question": f"Use a tool for {n}.", "answer": str(n)} for n in range(num)]
    )


def used(completion):
    return float(sum(message["role"] == "tool" for message in completion))


def plus(a: int, b: int = 3) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b (int): The second number.

    Returns:
        The sum.
    """
    return a + b


async def find(
    text: str,
    mode: Literal["fast", "slow"] = "fast",
    limit: Optional[int] = None,  # noqa: UP045 (as people wrote it)
    tags: list[str] = [],  # noqa: B006
) -> list[dict]:
    """
    Find things.

    :param text: what to find
    :param mode: how
    """
    return [{"text": text, "mode": mode, "limit": limit, "tags": tags}]


def merge(options: dict[str, Any], items: list[int], flag: bool = False) -> dict:
    """Merge options.

    Parameters
    ----------
    options : dict
        What to merge.
    items : list
        Numbers.
    """
    return {"options": options, "items": items, "flag": flag}


class Point(TypedDict):
    x: float
    y: float


def move(point: Point, by: float | None = None, how: str | int = "up") -> str:
    """Move a point."""
    return json.dumps(point)


def plain(thing):
    return f"plain {thing}"


def fails(text: str) -> str:
    """Fail."""
    raise ValueError(f"cannot: {text}")


def nothing() -> None:
    """Return nothing."""


TOOLS = [plus, find, plain, fails, nothing]


def typed():
    rubric = vf.RubricGroup(rubrics=[vf.Rubric(funcs=[used]), vf.ToolRubric(tools=TOOLS)])
    return vf.ToolEnv(tools=TOOLS, dataset=rows(10), rubric=rubric, max_turns=4)


def dicts():
    return vf.ToolEnv(tools=[merge], dataset=rows(), rubric=vf.Rubric(funcs=[used]), max_turns=2)


def typed_dict():
    return vf.ToolEnv(tools=[move], dataset=rows(), rubric=vf.Rubric(funcs=[used]), max_turns=2)


def formatted():
    env = vf.ToolEnv(
        tools=[fails, plus],
        dataset=rows(),
        rubric=vf.Rubric(funcs=[used]),
        error_formatter=lambda error: f"{type(error).__name__} happened",
        max_turns=3,
    )
    env.add_tool(nothing)
    env.remove_tool(plus)
    return env


class Logged(vf.ToolEnv):
    async def call_tool(self, tool_name, tool_args, tool_call_id, **kwargs):
        message = await super().call_tool(tool_name, tool_args, tool_call_id, **kwargs)
        return {**message, "content": f"[{tool_name} {sorted(tool_args)}] {message['content']}"}

    async def env_response(self, messages, state, **kwargs):
        replies = await super().env_response(messages, state, **kwargs)
        state["num_replies"] = state.get("num_replies", 0) + len(replies)
        return [*replies, {"role": "user", "content": "And?"}]


def logged():
    def replies(state):
        return state.get("num_replies", 0)

    return Logged(tools=[plus, fails], dataset=rows(), rubric=vf.Rubric(funcs=[replies]))


class Wallet(vf.StatefulToolEnv):
    """A tool whose required argument comes from the state."""

    def __init__(self, **kwargs):
        super().__init__(tools=[plus], **kwargs)
        self.add_tool(self.spend, args_to_skip=["wallet", "limit"])
        self.add_tool(look)

    async def setup_state(self, state, **kwargs):
        state["wallet"] = [10]
        return await super().setup_state(state, **kwargs)

    async def spend(self, amount: int, wallet: list[int], limit: int, why: str = "fun") -> str:
        """Spend coins.

        Args:
            amount: How many.
            wallet: Where from.
            why: What for.
        """
        if amount > limit:
            raise RuntimeError("too much")
        wallet[0] -= amount
        wallet.append(amount)
        return f"{wallet[0]} left, {why}"

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        state["updated"] = state.get("updated", 0) + 1
        if tool_name == "spend":
            return {**tool_args, "wallet": state["wallet"], "limit": 5}
        if tool_name == "look":
            tool_args["depth"] = len(messages)
        return tool_args


def look(where: str, depth: int) -> str:
    """Look somewhere."""
    return f"{where} at {depth}"


def wallet():
    def coins(state):
        return state["wallet"][0]

    def updated(state):
        return state.get("updated", 0)

    rubric = vf.Rubric(funcs=[coins, updated], weights=[0.1, 0.0])
    return Wallet(dataset=rows(10), rubric=rubric, max_turns=5)


def completion_tools():
    data = Dataset.from_list([{"prompt": "x", "answer": "", "example_id": 0, "task": "t"}])
    return vf.ToolEnv(
        tools=[plus], dataset=data, rubric=vf.Rubric(funcs=[used]), message_type="completion"
    )


def no_tools():
    return vf.ToolEnv(dataset=rows(), rubric=vf.Rubric(funcs=[used]))


def tools_in_info():
    tool = {
        "type": "function",
        "function": {
            "name": "plus",
            "description": "Another text.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    data = Dataset.from_list(
        [{"question": "go", "answer": "", "info": json.dumps({"oai_tools": [tool]})}]
    )
    return vf.ToolEnv(tools=[plus], dataset=data, rubric=vf.Rubric(funcs=[used]), max_turns=2)


def plain_tools():
    """A plain MultiTurnEnv with oai_tools given by hand."""

    class ByHand(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            calls = messages[-1].get("tool_calls") or []
            replies = [
                {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]}
                for call in calls
            ]
            return replies or [{"role": "user", "content": "Call one."}]

    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    return ByHand(dataset=rows(), rubric=vf.Rubric(funcs=[used]), oai_tools=[tool], max_turns=4)


def settable():
    env = vf.ToolEnv(tools=[plus], dataset=rows(), rubric=vf.Rubric(funcs=[used]), max_turns=2)
    env.tools = [fails]
    env.tool_map = {"fails": fails}
    env.oai_tools = [env.oai_tools[0]]
    return env


class Shell(vf.SandboxEnv):
    """A sandbox with hosted settings; post_rollout runs before it is gone."""

    def __init__(self, **kwargs):
        super().__init__(sandbox_name="probe", timeout_per_command_seconds=10, **kwargs)

    async def post_rollout(self, state):
        state["after"] = "sandbox_id" in state

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        if tool_name == "bash":
            return {
                "command": "echo " + str(len(messages)) + "; echo bad >&2",
                "sandbox_id": state["sandbox_id"],
            }
        return tool_args


def shell():
    def after(state):
        return float(state.get("after", False))

    return Shell(dataset=rows(3), rubric=vf.Rubric(funcs=[after, used]), max_turns=3)


def load_environment(kind, **kwargs):
    return globals()[kind](**kwargs)
