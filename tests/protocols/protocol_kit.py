"""Worlds, agents and models for tests of protocols: small, scripted, and without threads."""

from rolltree.agents import Agent, ToolAgent
from rolltree.agents.protocols import delegate_tool
from rolltree.testing import ScriptedClient
from rolltree.values.steps import ParseResult, StepOutcome


class CountWorld:
    """Ends after `end` steps, or is cut after `cut`. Every step is worth `reward`."""

    in_thread = False

    def __init__(self, end=None, cut=None, reward=1.0):
        self.end, self.cut, self.reward = end, cut, reward
        self.actions, self.seeds, self.num_closed = [], [], 0

    def reset(self, *, seed=None):
        self.seeds.append(seed)
        return "start", {}

    def step(self, action):
        self.actions.append(action)
        count = len(self.actions)
        return StepOutcome(
            f"after {action}",
            self.reward,
            terminated=count == self.end,
            truncated=count == self.cut,
        )

    def close(self):
        self.num_closed += 1


def move(text):
    """An action is what follows "move "; anything else costs 0.5 and is answered."""
    if text.startswith("move "):
        return ParseResult(text.removeprefix("move "), 0.25)
    return ParseResult(None, -0.5, "Say: move N")


def an_agent(answers, kind=Agent, **settings):
    settings.setdefault("parser", move)
    return kind(ScriptedClient(answers), **settings)


def a_call(task, name="delegate"):
    """What a model writes to call a tool with one task, or with several at once."""
    tasks = [task] if isinstance(task, str) else task
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": f'{{"task": "{each}"}}'}}
            for each in tasks
        ],
    }


def a_delegator(answers, *names, **settings):
    tools = [delegate_tool(name) for name in names or ("delegate",)]
    return an_agent(answers, ToolAgent, external_tools=tools, **settings)
