"""Rubrics, judges, parsers, tool schemas and example tools as verifiers 0.1.8 had them."""

import asyncio
import copy
import functools
import importlib
import logging
import sys
import threading
from types import SimpleNamespace

import pytest

import rolltree as rt
from rolltree.inference import OpenAIClient
from rolltree.testing import ScriptedServer
from rolltree.values.errors import ConfigError
from rolltree.verifiers import model_calls
from rolltree.verifiers import verifiers as vf
from rolltree.verifiers.example_tools import calculator, python, search_ddg

SAID = [{"role": "assistant", "content": "it is 4"}]


def state_of(**fields):
    row = {"prompt": [{"role": "user", "content": "2 + 2"}], "answer": "4", "example_id": 0}
    state = vf.State(input={**row, "task": "sums", "info": {"n": 1}})
    state["completion"] = SAID
    state["trajectory"] = [{"reward": None, "advantage": None}]
    state["timing"] = {"generation_ms": 1.0, "scoring_ms": 0.0, "total_ms": 1.0}
    state["reward"] = state["metrics"] = None
    state.update(fields)
    return state


def scored(rubric, *states):
    states = list(states or [state_of()])
    asyncio.run(rubric.score_group(states, score_sem=asyncio.Semaphore(2)))
    return states


def test_it_is_a_rubric_of_both():
    assert issubclass(vf.Rubric, rt.Rubric)
    for name in ("RubricGroup", "ToolRubric", "JudgeRubric", "MathRubric"):
        assert issubclass(getattr(vf, name), (vf.Rubric, getattr(rt, name)))
    for name in ("XMLParser", "ThinkParser", "MaybeThinkParser"):
        assert issubclass(getattr(vf, name), (vf.Parser, getattr(rt, name)))


def test_functions_are_called_one_after_another_in_the_event_loop():
    threads, seen = [], []

    def first(state):
        threads.append(threading.current_thread())
        state["found"] = 3
        return True

    async def second(state, completion, answer, task, info, prompt, parser):
        seen.append((completion, answer, task, info, prompt[0]["role"], type(parser)))
        return state["found"]

    (state,) = scored(vf.Rubric([first, second], [0.5, 2]))
    assert state["metrics"] == {"first": 1.0, "second": 3.0}
    assert state["reward"] == 6.5
    assert state["trajectory"][0] == {"reward": 6.5, "advantage": 0.0}
    assert threads == [threading.main_thread()]
    assert seen == [(SAID, "4", "sums", {"n": 1}, "user", vf.Parser)]


def test_a_failing_function_scores_zero_and_leaves_a_trace():
    def none(completion):
        return None

    def unknown(completion, nobody_has_this):
        return 1.0

    async def leaves(completion):
        raise SystemExit(1)

    def text():
        return "0.5"

    (state,) = scored(vf.Rubric([none, unknown, leaves, text]))
    assert state["metrics"] == {"none": 0.0, "unknown": 0.0, "leaves": 0.0, "text": 0.5}
    assert state["reward"] == 0.5
    assert sorted(state["scoring_errors"]) == ["leaves", "none", "unknown"]
    assert "nobody_has_this" in state["scoring_errors"]["unknown"]["message"]
    assert state.get("error") is None


def test_a_wrapped_function_keeps_its_parameters():
    def scale(func):
        @functools.wraps(func)
        def wrapped(*args, **kwargs):
            return 2.0 * func(*args, **kwargs)

        return wrapped

    @scale
    def has_answer(completion, answer):
        return float(answer in completion[0]["content"])

    def counted(completion, char="i"):
        return completion[0]["content"].count(char)

    spaces = functools.partial(counted, char=" ")
    (state,) = scored(vf.Rubric([has_answer, spaces, lambda **kw: len(kw["task"])]))
    assert state["metrics"] == {"has_answer": 2.0, "counted": 2.0, "<lambda>": 4.0}


def test_funcs_and_weights_may_be_changed_at_any_time():
    given = []
    rubric = vf.Rubric(given)
    rubric.funcs.append(lambda: 1.0)
    rubric.weights.append(0.25)
    assert rubric.funcs is not given  # an empty list is replaced, as it was
    assert scored(rubric)[0]["reward"] == 0.25
    rubric.weights[0] = 4.0
    assert scored(rubric)[0]["reward"] == 4.0
    rubric.funcs.append(lambda: 100.0)  # no weight: not asked
    assert scored(rubric)[0]["reward"] == 4.0
    with pytest.raises(ValueError, match="weights"):
        vf.Rubric([len], [1.0, 2.0])


def test_group_functions_get_plurals_and_their_values_stay_as_they_are():
    def ranks(states, answers, infos):
        assert (answers, infos) == (["4", "4"], [{"n": 1}, {"n": 1}])
        return list(range(len(states)))

    def fails(completions) -> list:
        raise RuntimeError("no")

    first, second = scored(vf.Rubric([ranks, fails]), state_of(), state_of())
    assert (first["metrics"], second["metrics"]) == (
        {"ranks": 0, "fails": 0.0},
        {"ranks": 1, "fails": 0.0},
    )
    assert (first["advantage"], second["advantage"]) == (-0.5, 0.5)
    assert "fails" in second["scoring_errors"]


def test_a_group_function_without_one_number_each_counts_as_one_that_raises():
    def too_few(prompts):
        return [1.0]

    def nothing(states):
        return None

    def half(states):
        return [1.0, "one"]

    first, second = scored(vf.Rubric([too_few, nothing, half]), state_of(), state_of())
    assert first["metrics"] == {"too_few": 0.0, "nothing": 0.0, "half": 1.0}
    assert second["metrics"] == {"too_few": 0.0, "nothing": 0.0, "half": 0.0}
    assert sorted(first["scoring_errors"]) == ["nothing", "too_few"]
    assert sorted(second["scoring_errors"]) == ["half", "nothing", "too_few"]
    assert "each of 2 rollouts" in first["scoring_errors"]["too_few"]["message"]


def test_score_rollout_with_and_without_a_semaphore():
    rubric, state = vf.Rubric([lambda: 1.0]), state_of()
    for arguments in ((state,), (state, asyncio.Semaphore(1)), (state, None)):
        asyncio.run(rubric.score_rollout(*arguments))
    asyncio.run(rubric.score_rollout(state=state, score_sem=asyncio.Semaphore(1)))
    assert state["reward"] == 1.0
    with pytest.raises(AssertionError):
        asyncio.run(vf.Rubric().score_rollout(state))


def test_a_group_adds_up_and_so_do_its_advantages():
    def half(states):
        return [0.5 * index for index in range(len(states))]

    group = vf.RubricGroup([vf.Rubric([lambda: 1.0]), vf.Rubric([half, lambda: 2.0], [2.0, 1.0])])
    group.add_reward_func(lambda state: float("extra" in state))
    first, second = scored(group, state_of(), state_of(extra=1))
    assert (first["reward"], second["reward"]) == (3.0, 5.0)
    assert second["metrics"] == {"<lambda>": 3.0, "half": 0.5}
    assert (first["advantage"], second["advantage"]) == (-1.0, 1.0)
    assert second["trajectory"][0] == {"reward": 5.0, "advantage": 1.0}
    with pytest.raises(ValueError, match="at least one"):
        vf.RubricGroup([])


def test_tool_calls_are_counted():
    def search(query: str) -> str:
        """Find."""

    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    said = [{"role": "assistant", "tool_calls": [call, call]}, {"role": "tool", "content": ""}]
    rubric = vf.ToolRubric([search])
    (state,) = scored(rubric, state_of(completion=said))
    assert state["metrics"] == {"total_tool_calls": 2.0, "search_calls": 2.0}
    assert state["reward"] == 0.0
    assert rubric.oai_tools[0]["function"]["parameters"]["properties"]["query"]["title"] == "Query"
    (state,) = scored(rubric, state_of(completion="text"))
    assert state["metrics"] == {"total_tool_calls": 0.0, "search_calls": 0.0}


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("so \\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("<think>\\boxed{1}</think>2", "2", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_math(text, answer, reward):
    pytest.importorskip("math_verify")
    said = [{"role": "assistant", "content": text}]
    rubric = vf.MathRubric()
    (state,) = scored(rubric, state_of(completion=said, answer=answer))
    assert state["metrics"] == {"correct_answer_reward_func": reward}
    assert rubric.correct_answer_reward_func(rubric.parser, said, answer) == reward


def test_a_comparison_that_takes_for_ever_is_wrong(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(vf.MathRubric, "comparison_limit_s", 0.5)
    said = [{"role": "assistant", "content": "\\boxed{9^{9^{9^{9}}}}"}]
    (state,) = scored(vf.MathRubric(), state_of(completion=said))
    assert state["reward"] == 0.0


class Judge:
    """A client that answers with what it was asked by."""

    def __init__(self, name="", blocking=False, error=None):
        self.requests = []
        self.chat = SimpleNamespace(completions=self)
        self.name, self.error = name, error
        self.create = self.answer if blocking else self.answer_later

    def answer(self, **fields):
        self.requests.append(fields)
        if self.error:
            raise self.error
        message = SimpleNamespace(content=f"{self.name} yes")
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    async def answer_later(self, **fields):
        return self.answer(**fields)


async def agrees(judge, prompt, completion, answer, state):
    return float("yes" in await judge(prompt, completion, answer, state))


@pytest.mark.parametrize("blocking", [False, True])
def test_a_judge_is_asked_once_per_prompt(blocking):
    judge = Judge(blocking=blocking)
    rubric = vf.JudgeRubric(
        judge_client=judge,
        judge_model="j",
        judge_prompt="{question}|{answer}|{response}",
        judge_sampling_args={"max_tokens": 5, "temperature": None},
    )
    rubric.add_reward_func(agrees)
    rubric.add_reward_func(functools.wraps(agrees)(lambda **given: agrees(**given)), 0.0)
    (state,) = scored(rubric)
    assert state["reward"] == 1.0
    assert judge.requests == [
        {
            "model": "j",
            "messages": [{"role": "user", "content": "2 + 2|4|it is 4"}],
            "max_completion_tokens": 5,
        }
    ]
    assert state["judge_response"] == {"2 + 2|4|it is 4": " yes"}


def test_what_is_replaced_after_construction_counts():
    before, after = Judge("before"), Judge("after")
    rubric = vf.JudgeRubric(judge_client=before)
    rubric.add_reward_func(agrees)
    rubric.judge_client, rubric.judge_model, rubric.judge_prompt = after, "m", "Q: {question}"
    rubric.judge_sampling_args = {"temperature": 0}
    scored(rubric)
    assert not before.requests
    assert after.requests[0]["messages"][0]["content"] == "Q: 2 + 2"
    assert (after.requests[0]["model"], after.requests[0]["temperature"]) == ("m", 0)


def test_a_prompt_with_fields_of_its_own_is_for_the_rubrics_functions():
    async def own(judge_client, judge_model, judge_prompt, answer):
        text = judge_prompt.format(reference=answer, rules="none")
        messages = [{"role": "user", "content": text}]
        reply = await judge_client.chat.completions.create(model=judge_model, messages=messages)
        return float("yes" in reply.choices[0].message.content)

    judge = Judge()
    rubric = vf.JudgeRubric(judge_client=judge, judge_prompt="{reference} by {rules}")
    rubric.add_reward_func(own)
    rubric.add_reward_func(agrees)
    (state,) = scored(rubric)
    assert state["metrics"] == {"own": 1.0, "agrees": 0.0}
    assert judge.requests[0]["messages"][0]["content"] == "4 by none"


def test_a_judge_that_fails_is_a_runtime_error():
    openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
    slow = openai.APITimeoutError(httpx.Request("POST", "http://judge"))
    for error, said in ((slow, "timeout"), (ValueError("odd"), "Unexpected error")):
        rubric = vf.JudgeRubric(judge_client=Judge(error=error))
        with pytest.raises(RuntimeError, match=said) as raised:
            asyncio.run(rubric.judge("q", "a", "b", state_of()))
        assert raised.value.__cause__ is error


def test_a_blocking_openai_client_is_asked_in_threads_with_one_warning(caplog, monkeypatch):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url="http://judge", api_key="none")
    threads = []

    def create(**fields):
        threads.append(threading.current_thread())
        return Judge("blocking").answer(**fields)

    monkeypatch.setattr(client.chat.completions, "create", create)
    model_calls._warn_of_threads.cache_clear()
    rubric = vf.JudgeRubric(judge_client=client)
    rubric.add_reward_func(agrees)
    monkeypatch.setattr(logging.getLogger("rolltree"), "propagate", True)
    with caplog.at_level(logging.WARNING, "rolltree.verifiers"):
        states = scored(rubric, state_of(), state_of())
    assert [state["reward"] for state in states] == [1.0, 1.0]
    assert threading.main_thread() not in threads
    assert len(threads) == 2
    assert sum("in threads" in record.message for record in caplog.records) == 1
    wrapped = model_calls.async_client(client)
    assert wrapped.base_url == copy.copy(wrapped).base_url == client.base_url
    assert copy.copy(wrapped.chat).completions
    client.close()


def test_arithmetic():
    assert calculator("3 * (17 + 4)") == "63"
    assert calculator("100 / 5") == "20.0"
    assert calculator(" -2**2 // 3") == "-2"
    assert calculator("10**(1/2)") == str(10**0.5)
    assert calculator("1/0") == "Error: division by zero"
    assert calculator("import os") == "Error: Invalid characters in expression"
    assert calculator("9**9**9") == "Error: the power is too large"
    assert calculator("1 +").startswith("Error: invalid syntax")
    assert calculator("1(2)").startswith("Error: ")


def test_code_runs_as_a_cell_in_a_sandbox(tmp_path):
    try:
        assert python("x = 5\nprint('a')\nx + 10") == "a\n15"
    except rt.values.errors.SandboxUnavailable as error:
        pytest.skip(str(error))
    assert python("a = 1\na, None") == "(1, None)"
    assert python("y = 1").strip() == ""
    assert python("    for n in range(2):\n        print(n)") == "0\n1"
    assert python("1 / 0").endswith("ZeroDivisionError: division by zero")
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    assert "hidden" not in python(f"open({str(secret)!r}).read()")


def test_a_search_without_its_package_tells_the_model():
    assert search_ddg("anything").startswith("Error: No module named")


async def test_a_client_of_rolltrees_can_be_the_judge():
    with ScriptedServer(lambda request: "yes", model="m") as server:
        client = OpenAIClient(server.base_url, "m")
        rubric = vf.JudgeRubric(judge_client=client, judge_model="m")
        rubric.add_reward_func(agrees)
        state = state_of()
        await rubric.score_group([state])
        await client.aclose()
    assert state["reward"] == 1.0
    assert list(state["judge_response"].values()) == ["yes"]


def test_tools_and_configurations_without_pydantic_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    monkeypatch.delitem(sys.modules, "rolltree.verifiers.configs", raising=False)
    with pytest.raises(ConfigError, match=r"rolltree\[compat\]"):
        vf.ToolRubric([calculator])
    with pytest.raises(ConfigError, match=r"rolltree\[compat\]"):
        importlib.import_module("rolltree.verifiers.configs")
