"""Environments of every kind, and the odd answers that models give, for the tests of exits."""

import json
import sys

import aiohttp

import rolltree as rt
from rolltree.agents import Agent, ReActAgent, ToolAgent
from rolltree.agents.protocols import (
    DelegatingProtocol,
    MultiAgentSyncProtocol,
    Opponent,
    SingleAgentProtocol,
    SubAgent,
    TurnProtocol,
    delegate_tool,
)
from rolltree.agents.worlds import GymWorld, ParallelGame, TurnGame, board_text
from rolltree.environments import EnvGroup, ProtocolEnvironment
from rolltree.environments.parsers import MaybeThinkParser, XMLParser, by_function, tagged
from rolltree.environments.rubrics import JudgeRubric, Rubric, RubricGroup, ToolRubric
from rolltree.gateway.calls import AgentCall
from rolltree.testing import ScriptedAnswer, ScriptedClient
from rolltree.values.types import FinishReason, SamplingParams
from rolltree.verifiers import verifiers as vf

# Environments


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


def square(a: int) -> int:
    """Square: of a long integer, one that Python refuses to print."""
    return a * a


def find(a: int) -> int:
    """Look a square up: its KeyError has no text."""
    return {}[a * a]


async def echo(text: str) -> str:
    """Say it."""
    return text


def repeat(text: str, a: int) -> str:
    """Say it again and again."""
    return text * max(0, min(a, 10**7))


def anything(**named: object) -> object:
    """Return what came."""
    return named


def measure(a: float, b: list[float] | None = None) -> list[float]:
    """Return numbers."""
    return [a, *(b or [])]


TOOLS = [add, square, find, echo, repeat, anything, measure]


ROWS = [{"question": "2 + 2?", "answer": "4", "info": {}}]


def verdict(completion, answer):
    return float(completion[-1]["content"] == answer) if completion else 0.0


async def judged(judge, prompt, completion, answer, state):
    return float((await judge(prompt, completion, answer, state)).startswith("yes"))


def single():
    parser = XMLParser(["think", "answer"])
    rubrics = [
        Rubric([verdict, parser.get_format_reward_func()], parser=parser),
        ToolRubric(tools=TOOLS, parser=MaybeThinkParser()),
        JudgeRubric([judged], judge_client=ScriptedClient(lambda messages: "yes")),
    ]
    return rt.SingleTurnEnv(dataset=ROWS, parser=parser, rubric=RubricGroup(rubrics))


class Filled(rt.StatefulToolEnv):
    def update_tool_args(self, tool_name, tool_args, messages, state):
        return {**tool_args, "b": 1} if tool_name == "add" else tool_args


def stateful():
    env = Filled(dataset=ROWS, tools=[echo, anything], rubric=Rubric([verdict]), max_turns=4)
    env.add_tool(add, args_to_skip=["b"])
    return env


def protocol(agent, world=None, **settings):
    return ProtocolEnvironment(
        SingleAgentProtocol(agent, max_steps=3),
        world,
        dataset=ROWS,
        **settings,
    )


def lake(row=None):
    return GymWorld("FrozenLake-v1", world_args={"is_slippery": False}, to_text=str)


def pendulum(row=None):
    return GymWorld("Pendulum-v1", to_text=str)


def family():
    child = SubAgent(lambda: Agent(parser=tagged("answer")))

    def parent():
        return ToolAgent(
            external_tools=[delegate_tool("echo")],
            tools=[add, square, find],
            parser=tagged("answer"),
        )

    return ProtocolEnvironment(
        DelegatingProtocol(parent, {"echo": child}, max_steps=3),
        None,
        dataset=ROWS,
    )


ENVIRONMENTS = {
    "single": single,
    "tools": lambda: rt.ToolEnv(dataset=ROWS, tools=TOOLS, rubric=Rubric([verdict]), max_turns=4),
    "stateful": stateful,
    "agent": lambda: protocol(lambda: ToolAgent(tools=TOOLS, parser=tagged("answer"))),
    "react": lambda: protocol(lambda: ReActAgent(tools=TOOLS, parser=by_function(json.loads))),
    "lake": lambda: protocol(lambda: Agent(), lake),
    "pendulum": lambda: protocol(lambda: Agent(), pendulum),
    "family": family,
}


class Talk(rt.MultiTurnEnv):
    async def env_response(self, messages, state):
        return [{"role": "user", "content": f"You said: {messages[-1]['content']}"}]


def together(idle_action=None):
    """Return rock, paper, scissors, in which a hand may be missing."""

    def world(row=None):
        hands = ["rock", "paper", "scissors"]
        settings = {"idle_action": idle_action, "to_text": lambda seen, agent: str(seen)}
        args = {"max_cycles": 3}
        return ParallelGame("classic/rps-v2", action_names=hands, world_args=args, **settings)

    def player():
        return ToolAgent(tools=[add], parser=tagged("answer"))

    protocol = MultiAgentSyncProtocol({"player_0": player, "player_1": Agent}, max_steps=4)
    return ProtocolEnvironment(protocol, world, dataset=ROWS)


def in_turns():
    def world(row=None):
        to_text = board_text(lambda row, column: 3 * row + column)
        return TurnGame("classic/tictactoe-v3", to_text=to_text)

    opponent = Opponent(lambda seed: lambda seen: seen.rpartition(" ")[2])
    protocol = TurnProtocol({"player_1": Agent, "player_2": opponent}, max_steps=4)
    return ProtocolEnvironment(protocol, world, dataset=ROWS)


QUESTION = {"role": "user", "content": "As JSON, please."}


async def falls_back(session, state):
    """Ask; if the answer is not JSON, ask in a mode that no engine here has, as dspy does."""
    messages = [QUESTION]
    for _ in range(3):
        reply = (await session.complete(AgentCall(messages))).message
        try:
            return {"said": json.loads(reply["content"])}
        except ValueError:
            messages = [*messages, reply, {"role": "user", "content": "That is not JSON."}]
    mode = SamplingParams(extra={"response_format": {"type": "json_object"}})
    return await session.complete(AgentCall([QUESTION], mode))


async def calls_tools(session, state):
    """Run tools as an agent framework: it sends back what it makes of the answers."""
    schemas = tuple(rt.ToolEnv(tools=TOOLS, dataset=ROWS).oai_tools)
    messages = [QUESTION]
    for _ in range(3):
        reply = (await session.complete(AgentCall(messages, tools=schemas))).message
        calls = [
            {"id": f"call_{i}", "type": "function", "function": dict(call["function"])}
            for i, call in enumerate(reply.get("tool_calls") or ())
        ]
        for call in calls:
            call["function"]["arguments"] = call["function"]["arguments"].removesuffix("{}")
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls
        ]
        again = {"role": "user", "content": "Go on."}
        said = {"role": "assistant", "content": reply["content"] or None, "tool_calls": calls}
        messages += [said, *results, again] if calls else [reply, again]


async def over_http(session, state):
    """Speak each protocol of the gateway, and send back what it gave, as agents' libraries do."""
    schemas = rt.ToolEnv(tools=TOOLS, dataset=ROWS).oai_tools
    functions = [schema["function"] for schema in schemas]
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with aiohttp.ClientSession(session.base_url + "/", headers=headers) as http:

        async def post(path, **body):
            async with http.post(path, json={"model": "m", **body}) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
                return answer

        chat, items, turns = [QUESTION], [QUESTION], [QUESTION]
        for _ in range(2):
            reply = await post("chat/completions", messages=chat, tools=schemas)
            said = reply["choices"][0]["message"]
            chat += [
                said,
                *(
                    {"role": "tool", "tool_call_id": call["id"], "content": "done"}
                    for call in said.get("tool_calls") or ()
                ),
            ]
            tools = [{"type": "function", **function} for function in functions]
            reply = await post("responses", input=items, tools=tools)
            items += [
                *reply["output"],
                *(
                    {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
                    for item in reply["output"]
                    if item["type"] == "function_call"
                ),
                QUESTION,
            ]
            tools = [
                {"name": function["name"], "input_schema": function["parameters"]}
                for function in functions
            ]
            reply = await post("messages", messages=turns, tools=tools, max_tokens=30_000)
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "done"}
                for block in reply["content"]
                if block["type"] == "tool_use"
            ]
            answer = {"role": "assistant", "content": reply["content"]}
            turns += [answer, {"role": "user", "content": results or "Go on."}]


# As a program: it ends badly if the answer is not JSON.
PROGRAM = """
import json, os, urllib.request
def ask(**body):
    body["model"] = "m"
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({{"messages": [{{"role": "user", "content": "?"}}], **body}}).encode(),
        {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
try:
    json.loads(ask())
except ValueError:
    print(ask(response_format={{"type": "json_object"}}))
"""


def harness(agent, reward):
    return lambda: rt.ProgramEnv(agent, dataset=ROWS, rubric=Rubric([reward]))


def one(state):
    """A reward that everything that is scored gets."""
    return 1.0


def ended_well(state):
    """A reward that fails where the gateway refused what the agent sent back."""
    assert state["program"]["error"] is None
    return 1.0


def theirs():
    """An environment that was written for verifiers."""

    def correct(completion, answer, **kwargs):
        return float(completion[-1]["content"] == answer)

    rubric = vf.RubricGroup([vf.Rubric(funcs=[correct]), vf.ToolRubric(tools=TOOLS)])
    return vf.ToolEnv(dataset=ROWS, tools=TOOLS, rubric=rubric, max_turns=4)


MORE_ENVIRONMENTS = {
    "talk": lambda: Talk(dataset=ROWS, max_turns=4, rubric=Rubric([verdict])),
    "group": lambda: EnvGroup([single(), ENVIRONMENTS["tools"]()]),
    "together": together,
    "together, idle": lambda: together(0),
    "in turns": in_turns,
    "falls back": harness(falls_back, one),
    "calls tools": harness(calls_tools, ended_well),
    "over HTTP": harness(over_http, ended_well),
    "program": harness([sys.executable, "-I", "-S", "-c", PROGRAM], one),
    "theirs": theirs,
}
"""Further kinds, whose plays take longer or are new to those who read only texts."""

# Answers


SPELLINGS = {
    "none": ("", "{text}", " "),
    "hermes": ("", '<tool_call>{{"name": {name}, "arguments": {text}}}</tool_call>', "\n"),
    "llama3": ("", '{{"name": {name}, "parameters": {text}}}', "; "),
    "mistral": ("[TOOL_CALLS][", '{{"name": {name}, "arguments": {text}}}', ", "),
    "deepseek": (
        "",
        "<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>{bare}\n"
        "```json\n{text}\n```<\uff5ctool\u2581call\u2581end\uff5c>",
        "\n",
    ),
    "glm": (
        "",
        "<tool_call>{bare}\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "\n",
    ),
    "qwen_xml": (
        "",
        "<tool_call>\n<function={bare}>\n<parameter=a>\n{text}\n</parameter>\n</function>\n"
        "</tool_call>",
        "\n",
    ),
    "harmony": (
        "",
        "<|start|>assistant<|channel|>commentary to=functions.{bare} json<|message|>{text}<|call|>",
        "",
    ),
    **{
        style: ("", f'{opened}{{{{"name": {{name}}, "arguments": {{text}}}}}}{closed}', "\n")
        for style, opened, closed in [
            ("longcat", "<longcat_tool_call>", "</longcat_tool_call>"),
            ("phi4", "functools[", "]"),
            ("granite", "<|tool_call|>[", "]"),
            ("internlm", "<|action_start|><|plugin|>", "<|action_end|>"),
            ("nemotron", "<TOOLCALL>[", "]</TOOLCALL>"),
            ("tool_calls", "<tool_calls>[", "]</tool_calls>"),
            ("xlam", "[", "]"),
        ]
    },
    "cohere": (
        "",
        '<|START_ACTION|>[{{"tool_name": {name}, "parameters": {text}}}]<|END_ACTION|>',
        "\n",
    ),
    "apertus": ("", "<|tools_prefix|>[{{{name}: {text}}}]<|tools_suffix|>", "\n"),
    "gigachat": ("", '<|function_call|>{{"name": {name}, "arguments": {text}}}', "\n"),
    "gemma4": ("", "<|tool_call>call:{bare}{{a:{text}}}<tool_call|>", ""),
    "functiongemma": ("", "<start_function_call>call:{bare}{{a:{text}}}<end_function_call>", ""),
    "kimi_k2": (
        "",
        "<|tool_call_begin|>functions.{bare}:0<|tool_call_argument_begin|>{text}<|tool_call_end|>",
        "",
    ),
    **{
        style: (
            "",
            f'{opened}<{prefix}invoke name={{name}}><{prefix}parameter name="a">{{text}}'
            f"</{prefix}parameter></{prefix}invoke>{closed}",
            "\n",
        )
        for style, prefix, opened, closed in [
            ("deepseek_dsml", "\uff5cDSML\uff5c", "", ""),
            ("step3", "steptml:", "<\uff5ctool_call_begin\uff5c>", "<\uff5ctool_call_end\uff5c>"),
            ("minimax_m2", "", "<minimax:tool_call>", "</minimax:tool_call>"),
        ]
    },
    "seed_oss": (
        "",
        "<seed:tool_call>\n<function={bare}>\n<parameter=a>{text}</parameter>\n</function>\n"
        "</seed:tool_call>",
        "\n",
    ),
    "lfm2": ("", "<|tool_call_start|>[{bare}(a={text})]<|tool_call_end|>", "\n"),
    "olmo3": ("", "<function_calls>{bare}(a={text})</function_calls>", "\n"),
    "llama4": ("", "[{bare}(a={text})]", "\n"),
    "gemma3": ("", "```tool_code\n{bare}(a={text})\n```", "\n"),
}
"""By format: what comes before the calls, one call, and what stands between two."""


def calling(style, *calls):
    """Return what a model writes in a format to make calls: pairs of a name and arguments."""
    head, each, between = SPELLINGS[style]
    spelled = [
        each.format(name=json.dumps(name), bare=name, text=arguments) for name, arguments in calls
    ]
    return head + between.join(spelled) + ("]" if head else "")


ADD = ("add", '{"a": 1, "b": 2}')


def odd_answers(style):
    """Return odd answers in a format by kind: texts, or `ScriptedAnswer`s."""
    good = calling(style, ADD)
    return {
        "empty": [""],
        "no tokens": [ScriptedAnswer("", ids=[]), ScriptedAnswer("", FinishReason.LENGTH, [])],
        "white space": [" ", "\n\t\n", "\u00a0\u2028"],
        "a broken call": [calling(style, ("add", '{"a": 1')), good[:-9], good[: len(good) // 2]],
        "two calls": [calling(style, ADD, ADD), calling(style, ADD, ("echo", '{"text": "x"}'))],
        "a good and a broken call": [calling(style, ADD, ("add", "{oops")), f"{good} and {good}"],
        "an unknown tool": [
            calling(style, (name, "{}")) for name in ("price", "", "a b", "\u00e9")
        ],
        "no object": [calling(style, ("add", text)) for text in ("[1]", '""', "null", "7", "")],
        "no arguments": [calling(style, ("add", "{}")), calling(style, ("anything", "{}"))],
        "nested": [
            calling(style, ("anything", '{"a":' * 2000)),
            calling(style, ("anything", '{"a":' * 90 + "1" + "}" * 90)),
            "[" * 5000,
        ],
        "control": [
            "\x00\x1b[2J\u202e",
            "\ud800",
            calling(style, ("echo", '{"text": "\\ud800\\u0000"}')),
            "<|im_start|>system\nx<|im_end|><|eot_id|><|endoftext|></s><|end|>",
            "<|channel|>final<|message|>12<|end|>",
            ScriptedAnswer("", ids=[255, 254, 237, 160, 128, 256, 0]),
        ],
        "unclosed": ["<think>hm", "</think>", "<tool_call>", "<answer>4", "[TOOL_CALLS]", "{"],
        "only reasoning": ["<think>hm</think>", "<|channel|>analysis<|message|>hm<|end|>"],
        "reasoning and a call": [f"<think>hm</think>{good}", f"So: {good}", f"{good} So."],
        "long": ["x" * 20_000, calling(style, ("echo", json.dumps({"text": "y" * 20_000})))],
        "numbers": [
            "9" * 5000,
            "1e999",
            "NaN",
            calling(style, ("square", '{"a": 1' + "0" * 4000 + "}")),
        ],
        "cut": [ScriptedAnswer(text, FinishReason.LENGTH) for text in (good, good[:-5], "4", "")],
        "an action": ["rock", "0", "1", "<answer>rock</answer>", "Action: add\nAction Input: [1]"],
        "harmless": ["4"],
    }
