"""Environments on what verifiers brings along: code sandbox, games, gyms, example data, judges."""

import asyncio
import sys
import threading
from pathlib import Path

import verifiers as vf
from datasets import Dataset
from verifiers.utils.data_utils import (
    BOXED_SYSTEM_PROMPT,
    THINK_BOXED_SYSTEM_PROMPT,
    extract_boxed_answer,
    load_example_dataset,
)

SERVER = Path(__file__).parents[1] / "stand_ins" / "mcp_words.py"


def boxed(parser, completion, answer):
    return float(parser.parse_answer(completion) == answer)


def formula(parser, completion, answer):
    return boxed(parser, completion, answer) / 2


def sums(num=4):
    return Dataset.from_list(
        [{"question": f"What is {n} plus {n + 3}?", "answer": str(2 * n + 3)} for n in range(num)]
    )


def code():
    """Code that the model writes runs in a sandbox; calls and answers are scored apart."""
    parser = vf.Parser(extract_fn=extract_boxed_answer)
    env = vf.PythonEnv(
        dataset=sums(),
        system_prompt="Calculate with Python.",
        parser=parser,
        rubric=vf.MathRubric(parser=parser),
        max_turns=4,
    )
    env.rubric = vf.RubricGroup(rubrics=[env.rubric, vf.ToolRubric(tools=env.tools)])
    return env


def gym(of="gcd", num=4, **kwargs):
    """Tasks of reasoning-gym, one or a mixture."""
    return vf.ReasoningGymEnv(gym=of, num_train_examples=num, num_eval_examples=num, **kwargs)


def gyms():
    return gym(["gcd", {"name": "basic_arithmetic", "weight": 3.0, "config": {}}], seed=4)


def game():
    """A game of TextArena whose observations are shortened, with all rewards in one rubric."""
    parser = vf.XMLParser(fields=["thought", "guess"], answer_field="guess")

    def won(parser, completion, answer):
        return float(parser.parse_answer(completion) == f"[{answer}]")

    def asked(parser, completion):
        return len(parser.get_user_messages(completion)) / 10

    rubric = vf.Rubric(funcs=[won, asked], weights=[1.0, 0.1], parser=parser)
    rubric.add_reward_func(parser.get_format_reward_func(), weight=0.1)
    return vf.TextArenaEnv(
        game="Wordle-v0",
        num_train_examples=4,
        num_eval_examples=5,
        system_prompt="Guess the word inside <guess>[...]</guess>.",
        parser=parser,
        rubric=rubric,
        feedback_fn=lambda observation: observation.strip()[-60:],
    )


def examples(name="gsm8k", split=None, **kwargs):
    """Example data by name, with a parser for reasoning and a boxed answer."""
    parser = vf.ThinkParser(extract_fn=extract_boxed_answer)
    data = load_example_dataset(name, split=split, n=6, **kwargs)
    rubric = vf.Rubric(
        funcs=[boxed, parser.get_format_reward_func()], weights=[1.0, 0.1], parser=parser
    )
    prompt = THINK_BOXED_SYSTEM_PROMPT
    return vf.SingleTurnEnv(eval_dataset=data, system_prompt=prompt, parser=parser, rubric=rubric)


def mixture():
    """Two example sets in a group; rows are chosen by number across both."""
    parser = vf.Parser(extract_fn=extract_boxed_answer)
    envs = [
        vf.SingleTurnEnv(
            dataset=load_example_dataset(name, split="train").select(range(num)),
            system_prompt=BOXED_SYSTEM_PROMPT,
            parser=parser,
            rubric=vf.Rubric(funcs=[func], weights=[weight], parser=parser),
        )
        for name, num, func, weight in (("gsm8k", 5, boxed, 1.0), ("math", 3, formula, 2.0))
    ]
    return vf.EnvGroup(envs, env_names=["words", "formulas"])


def continued(base_url=None):
    """A text is continued without a chat, and a judge grades what was written."""
    rows = [{"prompt": f"It was a dark and stormy night, number {n}", "answer": "and the rain fell"}
            for n in range(4)]  # fmt: skip
    grade = "Beginning: {question}\nEnd: {answer}\nWritten: {response}\nGrade it from A to C."
    rubric = vf.JudgeRubric(judge_prompt=grade)

    async def graded(judge, prompt, completion, answer, state):
        said = await judge(prompt, completion, answer, state)
        return {"A": 1.0, "B": 0.5}.get(said.strip()[:1], 0.0)

    rubric.add_reward_func(graded)
    return vf.SingleTurnEnv(
        message_type="completion", dataset=Dataset.from_list(rows), rubric=rubric
    )


class Remote:
    """A tool on an MCP server that runs in a thread of its own."""

    def __init__(self, owner, tool):
        self.owner, self.tool = owner, tool
        self.__name__ = tool.name

    def schema(self):
        function = {"name": self.tool.name, "description": self.tool.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.tool.inputSchema}}

    async def __call__(self, **arguments):
        asked = self.owner.session.call_tool(self.tool.name, arguments)
        told = asyncio.run_coroutine_threadsafe(asked, self.owner.loop)
        result = await asyncio.wrap_future(told)
        return "\n".join(part.text for part in result.content)


class RemoteTools(vf.ToolEnv):
    """Its tools are known only once a server has told them, after `__init__` of the base class."""

    def __init__(self, **kwargs):
        super().__init__(tools=[], **kwargs)
        self.loop, ready = asyncio.new_event_loop(), threading.Event()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._serve(ready), self.loop)
        if not ready.wait(60):
            raise TimeoutError("the server did not start")
        self.tools = [Remote(self, tool) for tool in self.told]
        self.oai_tools = [tool.schema() for tool in self.tools]
        self.tool_map = {tool.__name__: tool for tool in self.tools}

    async def _serve(self, ready):
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        command = StdioServerParameters(command=sys.executable, args=[str(SERVER)])
        async with stdio_client(command) as streams, ClientSession(*streams) as self.session:
            await self.session.initialize()
            self.told = (await self.session.list_tools()).tools
            ready.set()
            await asyncio.Event().wait()

    async def call_tool(self, tool_name, tool_args, tool_call_id, **kwargs):
        if tool_name not in self.tool_map:
            said = f"no tool {tool_name}"
        else:
            try:
                said = await self.tool_map[tool_name](**tool_args)
            except Exception as error:
                said = f"failed: {error}"
        return {"role": "tool", "content": said, "tool_call_id": tool_call_id}


def remote():
    rubric = vf.Rubric(funcs=[lambda completion: float(len(completion))])
    return RemoteTools(dataset=sums(), rubric=rubric, max_turns=4)


def load_environment(kind="code", **kwargs):
    return globals()[kind](**kwargs)
