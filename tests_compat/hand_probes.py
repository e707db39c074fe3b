"""Probes of what people do by hand: states, responses, clients and parsers of their own."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from play import attempt
from probes import part

sys.path.insert(0, str(Path(__file__).parent / "environments"))

STEP: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "q"}],
    "completion": [{"role": "assistant", "content": "a"}],
    "response": None,
    "tokens": None,
    "reward": None,
    "advantage": None,
    "extras": {},
}


def completed_by_hand(url: str) -> Any:
    """`is_completed` of states that nobody's `init_state` made."""
    import turns
    import verifiers as vf

    timing = {"start_time": 0.0, "generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0}
    row = {"prompt": STEP["prompt"], "answer": "a", "task": "t", "example_id": 0}
    states: dict[str, dict[str, Any]] = {
        "bare": {"prompt": STEP["prompt"], "trajectory": [STEP], "timing": dict(timing)},
        "input": {"input": row, "trajectory": [STEP, STEP], "timing": dict(timing)},
        "too long": {
            "input": row,
            "trajectory": [STEP],
            "timing": dict(timing),
            "prompt_too_long": True,
        },
        "no timing": {"prompt": STEP["prompt"], "trajectory": [STEP]},
        "no prompt": {"trajectory": [STEP], "timing": dict(timing)},
    }
    envs = {
        "single": lambda: vf.SingleTurnEnv(dataset=turns.sums(1)),
        "game": turns.game,
        "tools": lambda: vf.ToolEnv(dataset=turns.sums(1), tools=[]),
    }
    found: dict[str, Any] = {}
    for kind, make in envs.items():
        for name, fields in states.items():
            for cls in (vf.State, dict):
                state = cls({**fields, "points": 0, "timing": dict(fields.get("timing", {}))})
                if "timing" not in fields:
                    del state["timing"]
                env = make()
                done = attempt(lambda env=env, state=state: asyncio.run(env.is_completed(state)))
                found[f"{kind} {name} {cls.__name__}"] = {
                    "done": done,
                    "state": {key: value for key, value in dict(state).items() if key != "timing"},
                }
    return found


def begun_by_hand(url: str) -> Any:
    """`init_state` with little, and `generate` with the words of the specification."""
    import turns
    import verifiers as vf
    from openai import AsyncOpenAI

    row = {"prompt": STEP["prompt"], "example_id": 0}

    def env(**settings: Any) -> Any:
        return vf.SingleTurnEnv(
            dataset=turns.sums(1), rubric=vf.Rubric([turns.correct]), **settings
        )

    async def begun(*args: Any) -> Any:
        state = await env().init_state(row, *args)
        return [state["task"], state["model"], state["client"] is None]

    async def scored(**settings: Any) -> Any:
        async with AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=0) as client:
            made = env()
            found = await made.generate(
                made.get_eval_inputs(), client, "model", use_tqdm=False, **settings
            )
            return found["completion"]

    async def task(**settings: Any) -> Any:
        return (await env(**settings).init_state(row, None, "m"))["task"]

    return {
        "alone": attempt(lambda: asyncio.run(begun())),
        "client": attempt(lambda: asyncio.run(begun(None, "m"))),
        "score_rollouts": attempt(lambda: asyncio.run(scored(score_rollouts=True))),
        "task": attempt(lambda: asyncio.run(task())),
        "task of a name": attempt(lambda: asyncio.run(task(env_id="named"))),
    }


def responses_by_hand(url: str) -> Any:
    """`parse_response_*` of responses that are empty, odd, or no responses."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletion
    from verifiers.utils.response_utils import parse_response_messages, parse_response_tokens

    def chat(choices: list[Any], **fields: Any) -> Any:
        return ChatCompletion.model_construct(id="1", choices=choices, **fields)

    def text(choices: list[Any]) -> Any:
        return Completion.model_construct(id="1", choices=choices)

    def said(**fields: Any) -> Any:
        message = SimpleNamespace(content="hi", tool_calls=None)
        return SimpleNamespace(message=message, finish_reason="stop", index=0, **fields)

    entries = SimpleNamespace(content=[SimpleNamespace(logprob=p) for p in (-0.1, -0.7)])
    column = SimpleNamespace(token_logprobs=[-0.1, -0.7])
    spoken = SimpleNamespace(
        text="hi", finish_reason="stop", prompt_token_ids=[1], token_ids=[2, 3], logprobs=column
    )
    responses = {
        "chat": chat([said(token_ids=[2, 3], logprobs=entries)], prompt_token_ids=[1]),
        "no ids": chat([said(logprobs=entries)]),
        "no logprobs": chat([said(token_ids=[2, 3], logprobs=None)], prompt_token_ids=[1]),
        "dict logprobs": chat(
            [said(token_ids=[2], logprobs={"content": [{"logprob": -0.1}]})], prompt_token_ids=[1]
        ),
        "no tokens": chat(
            [said(token_ids=[], logprobs=SimpleNamespace(content=[]))], prompt_token_ids=[1]
        ),
        "two choices": chat([said(), said()]),
        "text": text([spoken]),
        "text without": text([SimpleNamespace(text="hi", finish_reason="stop")]),
        "none": None,
    }
    found: dict[str, Any] = {}
    for name, response in responses.items():
        for kind in ("chat", "completion"):
            found[f"{name} as {kind}"] = [
                attempt(lambda: asyncio.run(parse(response, kind, *limit)))
                for parse, limit in (
                    (parse_response_tokens, ()),
                    (parse_response_tokens, (2,)),
                    (parse_response_messages, ()),
                )
            ]
    return found


def clients_by_hand(url: str) -> Any:
    """No client at all, where the environment answers by itself, and where nobody does."""
    import turns
    import verifiers as vf
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

    class Answers(vf.SingleTurnEnv):
        async def get_model_response(self, client, model, prompt, **kwargs):
            message = {"role": "assistant", "content": f"{client} {sorted(kwargs)}"}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            fields = {"id": "1", "created": 0, "model": "m", "object": "chat.completion"}
            return ChatCompletion.model_validate({**fields, "choices": [choice]})

    def completion(kind: Any) -> Any:
        env = kind(dataset=turns.sums(2), rubric=vf.Rubric([turns.num_turns]))

        async def go() -> Any:
            found = await env.generate(env.get_eval_inputs(), None, "model", use_tqdm=False)
            return [found["completion"], found["reward"], found["metadata"]["base_url"]]

        return attempt(lambda: asyncio.run(go()))

    async def sent(name: str, given: Any) -> Any:
        import edits

        where = part(url, name)
        async with AsyncOpenAI(base_url=where, api_key="EMPTY", max_retries=0) as client:
            env = edits.own_sampling()
            row = env.get_eval_inputs()[0]
            state = await env.rollout(row, client, "model", given)
            return state["sampling_args"]

    return {
        "answers": completion(Answers),
        "nobody": completion(vf.SingleTurnEnv),
        "sampling": [
            attempt(lambda: asyncio.run(sent(name, given)))
            for name, given in (("a", None), ("b", {}), ("c", {"extra_body": {"c": 3}}))
        ],
    }


def rubrics_by_hand(url: str) -> Any:
    """Groups that lost their rubrics, functions by kind, and warnings of parsers."""
    import turns
    import verifiers as vf

    caught = io.StringIO()
    handler = logging.StreamHandler(caught)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logging.getLogger("verifiers").addHandler(handler)
    vf.SingleTurnEnv(dataset=turns.sums(1), parser=vf.MaybeThinkParser(), rubric=vf.Rubric())
    vf.SingleTurnEnv(dataset=turns.sums(1), parser=vf.Parser(), rubric=vf.Rubric())
    logging.getLogger("verifiers").removeHandler(handler)

    def both(completion, completions): ...

    def one(completion): ...

    lost = vf.RubricGroup([vf.Rubric()])
    lost.rubrics = []
    rubric = vf.Rubric([one, both], [0.5, 2.0])
    return {
        "warned": caught.getvalue(),
        "lost": attempt(lambda: lost.add_reward_func(one)),
        "kinds": {
            f"{kind} {name}": [
                getattr(item, "__name__", item)
                for item in getattr(rubric, f"_get_{kind}_reward_{name}")()
            ]
            for kind in ("individual", "group")
            for name in ("func_names", "funcs", "weights")
        },
        "keys": [
            sorted(vf.RolloutInput.__required_keys__),
            sorted(vf.RolloutInput.__optional_keys__),
        ],
        "completion": attempt(
            lambda: vf.SingleTurnEnv(
                dataset=turns.sums(1), message_type="completion", system_prompt="x"
            )
        ),
    }


def steps_by_hand(url: str) -> Any:
    """`add_model_response` of what is not a response of the environment's type, or is several."""
    import turns
    import verifiers as vf
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    def chat(num: int) -> Any:
        said = {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        choices = [{**said, "index": index} for index in range(num)]
        fields = {"id": "1", "created": 0, "model": "m", "object": "chat.completion"}
        return ChatCompletion.model_validate({**fields, "choices": choices})

    def text() -> Any:
        choice = {"index": 0, "finish_reason": "stop", "text": "hi", "logprobs": None}
        fields = {"id": "1", "created": 0, "model": "m", "object": "text_completion"}
        return Completion.model_validate({**fields, "choices": [choice]})

    async def step(kind: Any, response: Any) -> Any:
        env = vf.SingleTurnEnv(dataset=turns.sums(1), rubric=vf.Rubric(), message_type=kind)
        state = vf.State(trajectory=[])
        await env.add_model_response(state, STEP["prompt"] if kind == "chat" else "q", response)
        return [step["completion"] for step in state["trajectory"]]

    responses = {
        "none": None,
        "odd": SimpleNamespace(id="1"),
        "one": chat(1),
        "two": chat(2),
        "text": text(),
        "empty": ChatCompletion.model_construct(id="1", choices=[]),
    }
    return {
        f"{name} as {kind}": attempt(lambda: asyncio.run(step(kind, response)))
        for name, response in responses.items()
        for kind in ("chat", "completion")
    }


def tools_by_hand(url: str) -> Any:
    """`env_response`, `remove_tool` and `update_tool_args` called by themselves."""
    import copy

    import turns
    import verifiers as vf

    def add(a: int, b: int = 1) -> int:
        return a + b

    class Stateful(vf.StatefulToolEnv):
        def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            return {**tool_args, "b": 5}

    class Later(vf.StatefulToolEnv):
        async def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            return {**tool_args, "b": 5}

    def called(*arguments: Any) -> list[Any]:
        functions = [{"name": "add", "arguments": each} for each in arguments]
        calls = [{"id": str(n), "function": each} for n, each in enumerate(functions)]
        return [{"role": "assistant", "tool_calls": calls}]

    messages = {
        "one": called('{"a": 1}'),
        "two": called('{"a": 1}', '{"a": 2, "c": 3}'),
        "nothing called": called(),
        "no calls": [{"role": "assistant", "content": "x"}],
        "calls are none": [{"role": "assistant", "content": "x", "tool_calls": None}],
        "text": "text",
        "tuple": tuple(called('{"a": 1}')),
        "no messages": [],
    }
    found: dict[str, Any] = {}
    for kind in (vf.ToolEnv, Stateful, Later):

        def made(tools: Any, kind: Any = kind) -> Any:
            return kind(dataset=turns.sums(1), rubric=vf.Rubric(), tools=tools)

        def removed(tools: Any, *later: Any, made: Any = made) -> Any:
            env = made(tools)
            for tool in later:
                env.add_tool(tool)
            env.remove_tool(add)
            return [sorted(env.tool_map), len(env.tools), len(env.oai_tools)]

        for name, given in messages.items():
            found[f"{kind.__name__} {name}"] = attempt(
                lambda made=made, given=given: asyncio.run(
                    made([add]).env_response(copy.deepcopy(given), vf.State())
                )
            )
        found[f"{kind.__name__} removes"] = attempt(lambda removed=removed: removed([add]))
        found[f"{kind.__name__} removes added"] = attempt(lambda removed=removed: removed([], add))
    return found


def scored_by_hand(url: str) -> Any:
    """`score_group` and `score_rollout` of states that have metrics, or have no timing."""
    import copy
    from contextlib import nullcontext

    import verifiers as vf

    def one(completion):
        return 1.0

    def all_two(completions):
        return [2.0 for _ in completions]

    timing = {"start_time": 0.0, "generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0}
    fields = {"completion": STEP["completion"], "prompt": STEP["prompt"], "task": "t"}
    given = {**fields, "reward": 9.0, "metrics": {"lines": 7.0}, "trajectory": [STEP]}
    rubrics = {
        "plain": lambda: vf.Rubric([one]),
        "group function": lambda: vf.Rubric([all_two]),
        "none": vf.Rubric,
        "sum": lambda: vf.RubricGroup([vf.Rubric([one]), vf.Rubric([one], [2.0])]),
        "nested": lambda: vf.RubricGroup(
            [vf.RubricGroup([vf.Rubric([one])]), vf.RubricGroup([vf.Rubric([one])])]
        ),
        "of nothing": lambda: vf.RubricGroup([vf.Rubric()]),
    }

    def scored(rubric: Any, how: str, **more: Any) -> Any:
        state = vf.State(copy.deepcopy({**given, **more}))
        whom = [state] if how == "score_group" else state
        asyncio.run(getattr(rubric, how)(whom, score_sem=nullcontext()))
        return {
            "reward": state["reward"],
            "metrics": state["metrics"],
            "steps": [step["reward"] for step in state["trajectory"]],
        }

    found: dict[str, Any] = {}
    for name, make in rubrics.items():
        for how in ("score_group", "score_rollout"):
            found[f"{how} {name}"] = attempt(
                lambda make=make, how=how: scored(make(), how, timing=timing)
            )
    found["no timing"] = attempt(lambda: scored(vf.Rubric([one]), "score_group"))
    return found


def abstract_by_hand(url: str) -> Any:
    """Environments that leave methods out."""
    import turns
    import verifiers as vf

    class NoSetup(vf.Environment):
        async def rollout(self, *args, **kwargs): ...

    return {
        kind.__name__: attempt(lambda kind=kind: type(kind(dataset=turns.sums(1))).__name__)
        for kind in (vf.Environment, NoSetup, vf.MultiTurnEnv, vf.StatefulToolEnv, vf.ToolEnv)
    }
