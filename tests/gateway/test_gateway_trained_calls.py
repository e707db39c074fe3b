"""Which calls of an agent are trained: its task's, and not its titles, probes and classifiers."""

from __future__ import annotations

import asyncio
import json

import pytest
from gateway_kit import ADD, calling, openai_agent

import rolltree as rt
from rolltree.gateway.calls import AgentCall, CallOrigin
from rolltree.gateway.session import GatewaySession
from rolltree.gateway.trained_calls import BESIDE
from rolltree.inference.client_base import DelegatingClient
from rolltree.testing import ScriptedClient
from rolltree.values.errors import ConfigError
from rolltree.web.guard import RequestError

BIG, SMALL = "claude-sonnet-4-5", "claude-haiku-4-5"
TASK = "Add 2 and 2 in calc.py, and tell me what it prints."
CODER = "You are a coding agent. Working directory: /repo."
TITLE = "You are a title generator. Output only a title, of at most 50 characters."


class Agent:
    """Makes calls in one session, and answers them as it is told."""

    def __init__(self, **settings):
        self.answers: list = []
        client = ScriptedClient(lambda messages: self.answers.pop(0))
        self.session = GatewaySession("one", client, "http://127.0.0.1:1", **settings)

    async def ask(self, answer, *messages, tools=(), model=BIG, agent="", n=1):
        """Make a call; return the messages of the conversation after it."""
        self.answers += [answer] * n
        call = AgentCall(list(messages), model=model, tools=tuple(tools), n=n)
        found = await self.session.answers(call, CallOrigin(agent=agent, attempt=0))
        return [*messages, found[0].message]

    async def left_out(self):
        """Close the session; return which calls its steps leave out."""
        await self.session.aclose()
        steps = self.session.trajectory
        marked = {
            i: s["extras"]["left_out"] for i, s in enumerate(steps) if "left_out" in s["extras"]
        }
        assert marked == self.session.left_out
        return sorted(marked)


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def result(conversation, text):
    """Return a tool's result for the last call of a conversation."""
    return {
        "role": "tool",
        "tool_call_id": conversation[-1]["tool_calls"][0]["id"],
        "content": text,
    }


async def use_tool(agent, *begin, num=2, answer="It prints 4.", **more):
    """Play a conversation that calls a tool `num` times."""
    said = list(begin)
    for number in range(num):
        said = await agent.ask(
            calling("add", json.dumps({"a": number})), *said, tools=[ADD], **more
        )
        said.append(result(said, f"ran step {number}: exit status 0"))
    return await agent.ask(answer, *said, tools=[ADD], **more)


@pytest.mark.parametrize("model", [BIG, SMALL])
@pytest.mark.parametrize("num", [0, 2])
async def test_a_title_is_not_trained(num, model):
    """OpenCode asks for one beside the first call, however many follow."""
    agent = Agent()
    asked = user(f"Generate a title for this conversation:\n{TASK}")
    await agent.ask("Adding numbers", system(TITLE), asked, model=model)
    await use_tool(agent, system(CODER), user(TASK), num=num)
    assert await agent.left_out() == [0]
    state = agent.session.state
    assert state.prompt[0] == system(CODER)
    assert "title" not in json.dumps(state.completion)
    batch = rt.build_samples([state])
    (sample,) = batch.samples
    assert sample.info["left_out"] == ((0, 0, BESIDE),)


class Slow(DelegatingClient):
    """A client that holds calls of titles back."""

    def __init__(self, inner):
        super().__init__(inner)
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def call(self, call):
        if call.prompt[0]["content"] == TITLE:
            self.has_begun.set()
            await self.may_end.wait()
        return await call.to(self._inner)


async def test_a_title_that_ends_last_is_not_the_agents_answer():
    agent = Agent()
    slow = Slow(ScriptedClient(lambda messages: agent.answers.pop(0)))
    agent.session = GatewaySession("one", slow, "http://127.0.0.1:1")
    asked = AgentCall([system(TITLE), user(TASK)], model=SMALL)
    title = asyncio.ensure_future(agent.session.complete(asked))
    await slow.has_begun.wait()
    await use_tool(agent, system(CODER), user(TASK), num=0)
    agent.answers.append("Adding numbers")
    slow.may_end.set()
    await title
    assert await agent.left_out() == [1]
    assert agent.session.state.completion[-1]["content"] == "It prints 4."


async def test_probes_topics_and_classifiers_are_not_trained_but_sub_agents_are():
    """What Claude Code asks a small model for, beside its task."""
    agent = Agent()
    await agent.ask("#", user("quota"), model=SMALL)
    topic = '{"isNewTopic": true, "title": "Sums"}'
    await agent.ask(
        topic, system("Analyze if this message begins a topic."), user(TASK), model=SMALL
    )
    prefix = system("Your task is to extract the prefix of a shell command.")
    said = [system(CODER), user(TASK)]
    said = await agent.ask(calling("add", '{"a": 1}'), *said, tools=[ADD])
    await agent.ask("python", prefix, user("Command: python calc.py"), model=SMALL)
    said.append(result(said, "2 and 2 are 4, says calc.py"))
    said = await agent.ask(calling("add", '{"a": 2}'), *said, tools=[ADD])
    explorer = system("You are a file search specialist.")
    for name in ("first", "second"):  # the sub-agents have no names, but conversations of their own
        await use_tool(agent, explorer, user(f"Find the {name} file."), num=1, answer=f"{name}.py")
    await agent.ask("ls", prefix, user("Command: ls"), model=SMALL)
    said.append(result(said, "first.py, second.py"))
    await agent.ask("It prints 4.", *said, tools=[ADD])
    assert await agent.left_out() == [0, 1, 3, 9]


async def test_a_call_whose_answer_the_task_uses_is_trained():
    """A page that a tool summarized with the model; a plan that another agent follows."""
    agent = Agent()
    plan = "1. Read calc.py from top to bottom.\n2. Run it."
    await agent.ask(plan, system("You plan."), user(TASK), model=SMALL)
    said = [system(CODER), user(f"{TASK}\nThe plan:\n{plan}")]
    said = await agent.ask(calling("add", '{"a": 1}'), *said, tools=[ADD])
    page = "The page says that two and two are four."
    await agent.ask(page, user("Web page content: ... Summarize it."), model=SMALL)
    said.append(result(said, json.dumps({"summary": page})))
    await agent.ask("It prints 4.", *said, tools=[ADD])
    assert await agent.left_out() == []


async def test_a_chain_of_calls_that_the_task_uses_is_trained():
    agent = Agent()
    draft, final = "A draft of the plan, in a few words.", "The plan, in the end, is to run it."
    await agent.ask(draft, system("You draft plans."), user(TASK))
    await agent.ask(final, system("You improve plans."), user(draft))
    await use_tool(agent, system(CODER), user(f"{TASK} {final}"))
    assert await agent.left_out() == []


@pytest.mark.parametrize("answer", ["It prints 4.", "4"])
async def test_the_end_of_the_task_is_trained_even_without_tools(answer):
    agent = Agent()
    await use_tool(agent, system(CODER), user(TASK), answer=answer)
    writer = system("You write reports.")
    await agent.ask("Dear all, ...", writer, user(f"Findings: {answer} Report them."))
    assert await agent.left_out() == []


async def test_a_title_after_the_first_answer_is_not_its_end():
    agent = Agent()
    said = await use_tool(agent, system(CODER), user(TASK), num=1)
    await agent.ask("Adding numbers", system(TITLE), user(f"{TASK} It prints 4."))
    await agent.ask("Bye.", *said, user("Thanks."), tools=[ADD])
    assert await agent.left_out() == [2]


@pytest.mark.parametrize("num", [0, 2])
async def test_a_probe_before_the_task_is_not_trained(num):
    """Inspect asks some models to say hello first, by the same name, without a system message."""
    agent = Agent()
    await agent.ask("hello, world", user("Please say 'hello, world'"), model="gpt-5")
    await use_tool(agent, user(TASK), num=num or 1, model="gpt-5")
    assert await agent.left_out() == [0]


async def test_a_probe_before_a_task_of_one_kind_cannot_be_told_from_it():
    agent = Agent()
    await agent.ask("hello, world", user("Please say 'hello, world'"))
    await agent.ask("4", user("What is 2 + 2?"))
    assert await agent.left_out() == []


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("role", ["user", "assistant"])
async def test_a_summary_of_the_history_is_trained(own, role):
    """What the agent knows from then on is what the model wrote there."""
    agent = Agent()
    said = await use_tool(agent, system(CODER), user(TASK))
    summary = "The user wants a sum. Two steps were run, without errors."
    asks = user("Summarize the conversation so far.")
    if own:
        text = "\n".join(str(each["content"]) for each in said)
        await agent.ask(summary, system("You summarize."), user(text), model=SMALL)
    else:
        await agent.ask(summary, *said, asks)
    told = {"role": role, "content": summary}
    after = [system(CODER), *([user("What did we do?")] if role == "assistant" else []), told]
    await agent.ask("It still prints 4.", *after, user("And now?"), tools=[ADD])
    assert await agent.left_out() == []


async def test_two_sub_agents_at_once_are_trained():
    agent = Agent()
    workers = [system("You are worker one."), system("You are worker two.")]
    said = [[each, user(f"Do part {number}.")] for number, each in enumerate(workers)]
    for _ in range(3):
        for number, each in enumerate(said):
            each = await agent.ask(calling("add", "{}"), *each, tools=[ADD])
            said[number] = [*each, result(each, "done")]
    assert await agent.left_out() == []


@pytest.mark.parametrize("shape", ["plain", "system", "tools", "one with a tool", "two models"])
async def test_independent_calls_are_all_trained(shape):
    agent = Agent()
    for number in range(5):
        head = [system("You answer questions.")] if shape == "system" else []
        offers = shape == "tools" or (shape == "one with a tool" and number == 4)
        model = SMALL if shape == "two models" and number else BIG
        question = user(f"What is {number} + 2?")
        tools = [ADD] if offers else []
        await agent.ask(str(number + 2), *head, question, tools=tools, model=model)
    assert await agent.left_out() == []


async def test_resampled_prompts_and_several_answers_are_of_one_conversation():
    agent = Agent()
    await agent.ask("A title", system(TITLE), user(TASK), n=2)
    for _ in range(2):
        await agent.ask(calling("add", "{}"), system(CODER), user(TASK), tools=[ADD], n=2)
    assert await agent.left_out() == [0, 1]


@pytest.mark.parametrize("models", [(BIG, BIG, BIG), ("pro", "con", "judge")])
async def test_a_debate_and_its_judge_are_trained(models):
    agent = Agent()
    pro, con = [system("You are for it.")], [system("You are against it.")]
    words = "We should begin."
    for number in range(2):
        pro = await agent.ask(f"Yes, for reason {number}.", *pro, user(words), model=models[0])
        con = await agent.ask(
            f"No, for reason {number}.", *con, user(pro[-1]["content"]), model=models[1]
        )
        words = con[-1]["content"]
    judge = user(f"{pro[-1]['content']}\n{words}\nWho is right?")
    await agent.ask("pro", system("You judge."), judge, model=models[2])
    assert await agent.left_out() == []


async def test_a_commit_message_of_another_model_is_not_trained():
    """Aider has no tools: its task is the conversation with turns, and the message is the weak
    model's."""
    agent = Agent()
    said = await agent.ask("Here is a diff.", system("Act as an expert developer."), user(TASK))
    await agent.ask("feat: add", system("Write a commit message."), user("diff"), model="weak")
    await agent.ask("Another diff.", *said, user("Now subtract."))
    assert await agent.left_out() == [1]


async def test_an_agent_with_a_name_of_its_own_is_trained():
    agent = Agent()
    await agent.ask("pro", system("You judge."), user("Who is right?"), agent="judge")
    await use_tool(agent, system(CODER), user(TASK))
    assert await agent.left_out() == []


async def test_steps_of_the_program_itself_change_nothing():
    agent = Agent()
    agent.session.state["trajectory"].append({"prompt": "p", "completion": "c", "extras": {}})
    await agent.ask("A title", system(TITLE), user(TASK), model=SMALL)
    await use_tool(agent, system(CODER), user(TASK))
    assert await agent.left_out() == [1]


# -- rules ---------------------------------------------------------------------------------------


async def every_kind(agent):
    await agent.ask("A title", system(TITLE), user(TASK), model=SMALL)
    await agent.ask("4", system(CODER), user(TASK), tools=[ADD])
    await agent.ask("yes", user("Is it?"), agent="judge")


@pytest.mark.parametrize(
    ("rule", "left_out"),
    [
        ("all", []),
        ({"model": "*haiku*"}, [1, 2]),
        ({"model": ["*haiku*", "*sonnet*"]}, []),
        ({"tools": True}, [0, 2]),
        ({"tools": False, "agent": ""}, [1, 2]),
        ({"agent": "judge"}, [0, 1]),
        ({"root": "You are a coding agent*"}, [0, 2]),
        ({"root": "Is it[?]"}, [0, 1]),
        (lambda call: call.index == 1, [0, 2]),
        (lambda call: "add" in call.tools, [0, 2]),
        (lambda call: call.answer != "yes" and call.prompt[0]["role"] == "system", [2]),
    ],
)
async def test_a_rule_says_which_calls_are_trained(rule, left_out):
    agent = Agent(train_calls=rule)
    await every_kind(agent)
    assert await agent.left_out() == left_out
    # All are a part of what was said: only what is beside the task is not.
    assert "A title" in json.dumps(agent.session.state.completion)


async def test_reasons_name_the_condition_and_the_error():
    agent = Agent(train_calls={"tools": True, "model": "*opus*"})
    await every_kind(agent)
    reasons = agent.session.left_out
    assert reasons[0] == "its tools is False, and train_calls wants True"
    assert reasons[1] == f"its model is {BIG!r}, and train_calls wants '*opus*'"
    agent = Agent(train_calls=lambda call: call.prompt[9])
    await every_kind(agent)
    assert agent.session.left_out[0].startswith("train_calls raised IndexError: ")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("tsk", "Did you mean 'task'"),
        ({"modl": "a"}, "Did you mean 'model'"),
        ({"tools": "yes"}, "it takes true or false"),
        ({"agent": True}, "a pattern"),
        ({"agent": []}, "a pattern"),
        (asyncio.sleep, "has to be a plain one"),
        ({}, "Give 'task'"),
        (3, "Give 'task'"),
    ],
)
def test_a_rule_that_is_none_is_refused(rule, said):
    with pytest.raises(ConfigError, match=said.replace("(", "[(]")):
        rt.ProgramEnv(["true"], dataset=[{"question": "q"}], train_calls=rule)


# -- through restarts and stores -------------------------------------------------------------------


async def title_and_task(session, key=None):
    async with openai_agent(session, **({} if key is None else {"api_key": key})) as agent:

        async def ask(*messages, **more):
            return await agent.chat.completions.create(messages=list(messages), **more)

        await ask(system(TITLE), user(TASK), model="small")
        await ask(system(CODER), user(TASK), model="big", tools=[ADD])


def echo(messages):
    return messages[-1]["content"].upper()


@pytest.mark.parametrize("rule", ["task", {"model": "big"}, lambda call: call.model == "big"])
async def test_the_decision_survives_a_restart(tmp_path, rule):
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path, train_calls=rule) as g:
        s = g.session("one")
        await title_and_task(s)
        wanted = s.left_out
        assert list(wanted) == [0]
    if callable(rule):
        with pytest.raises(ConfigError, match="functions are not stored"):
            async with rt.gateway(ScriptedClient(echo), directory=tmp_path):
                pass
    given = {"train_calls": rule} if callable(rule) else {}
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path, **given) as g:
        s = g.sessions["one"]
        assert s.left_out == wanted
        await s.aclose()
        assert s.trajectory[0]["extras"]["left_out"] == wanted[0]


@pytest.mark.parametrize("rule", [None, "all", {"agent": "?*"}])
async def test_a_session_over_http_is_stored_with_what_it_leaves_out(tmp_path, rule):
    with rt.Run.open_or_create(tmp_path / "run", config={}, kind="gateway") as run:
        async with rt.gateway(ScriptedClient(echo), run=run) as g:
            s = g.open_session({"id": "one"} | ({} if rule is None else {"train_calls": rule}))
            await title_and_task(s)
            with pytest.raises(RequestError, match="train_calls"):
                g.open_session({"train_calls": 3})
            shown = s.summary()["left_out"]
            await g.close_session(s, {"reward": 1.0})
        wanted = {None: [0], "all": []}.get(rule if isinstance(rule, str | None) else "", [0, 1])
        assert [int(index) for index in shown] == wanted
    report = rt.audit(tmp_path / "run")
    assert report.ok, report.findings
    with rt.read_run(tmp_path / "run") as data:
        rows = list(data.calls().rows())
    assert [row["left_out"] is not None for row in rows] == [n in wanted for n in (0, 1)]
