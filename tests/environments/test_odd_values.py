"""What an environment's or an agent's code leaves behind: odd rewards, odd values in the state."""

import asyncio

import numpy as np
import pytest
from datasets import Dataset
from env_scripts import a_request

import rolltree as rt
from rolltree.agents import Agent
from rolltree.agents.protocols import SingleAgentProtocol, TurnProtocol
from rolltree.environments import ProtocolEnvironment
from rolltree.records import audit
from rolltree.rollouts import RolloutEngine
from rolltree.store import Run
from rolltree.values.errors import ServerError
from rolltree.values.steps import ParseResult, StepOutcome
from rolltree.verifiers import verifiers as vf

ROWS = [{"question": f"{i}?", "answer": "12"} for i in range(2)]
ODD_REWARDS = [float("nan"), float("inf"), -float("inf"), None, "1", [1.0], 10**400, 1e300, {}]


class PaidWorld:
    """Gives one reward, whatever the move."""

    in_thread = False
    possible_agents = ("x", "o")

    def __init__(self, reward, is_over=True):
        self.reward, self.is_over, self.current = reward, is_over, "x"

    def reset(self, *, seed=None):
        return "go", {}

    def step(self, action):
        return StepOutcome("seen", reward=self.reward, terminated=self.is_over)

    def close(self):
        pass


class TurnWorld(PaidWorld):
    """Two agents: the first moves once, and both get the reward."""

    def observe(self, agent):
        return "your move"

    def step(self, action):
        self.current = None
        return {name: super(TurnWorld, self).step(action) for name in self.possible_agents}


def one(completion):
    return 1.0


def an_agent(parser=None):
    settings = {} if parser is None else {"parser": parser}
    return Agent(reject_incomplete_completions=False, **settings)


def a_world_env(reward, parser=None, **settings):
    return ProtocolEnvironment(
        SingleAgentProtocol(lambda: an_agent(parser), max_steps=2),
        world=lambda row: PaidWorld(reward),
        num_train=2,
        num_eval=2,
        env_id="paid",
        **settings,
    )


def stored_evaluation(env, path, answers=("x",) * 3):
    """Evaluate into a run, audit it, and return the report and the stored states."""
    with Run.open_or_create(path, config={}, kind="eval") as run:
        report = rt.evaluate(env, rt.ScriptedClient(list(answers)), run=run)
    assert audit(path).ok
    with rt.read_run(path) as data:
        return report, list(data.rollouts().rows())


def named(state):
    return state["environment_errors"]["environment"]["message"]


@pytest.mark.parametrize(
    "reward",
    [np.float32(0.5), np.float64(0.5), np.int64(1), np.bool_(True), np.array(0.5), True, 1],
)
def test_a_world_may_give_any_number_as_a_reward(reward, tmp_path):
    report, rows = stored_evaluation(a_world_env(reward), tmp_path / "run")
    assert [row["reward"] for row in rows] == [float(reward)] * 2
    assert report.reward.mean == float(reward)


@pytest.mark.parametrize("reward", ODD_REWARDS, ids=str)
def test_a_worlds_odd_reward_counts_as_zero_and_is_named(reward, tmp_path):
    report, rows = stored_evaluation(a_world_env(reward), tmp_path / "run")
    assert [row["reward"] for row in rows] == [0.0, 0.0]
    assert not report.num_failed
    (state, _) = a_world_env(reward).evaluate_sync(rt.ScriptedClient(["x"])).state
    assert state["reward"] == 0.0
    assert state["error"] is None
    assert named(state).startswith("the world or a parser gave the reward")
    scored = a_world_env(reward, rubric=rt.Rubric([one])).evaluate_sync(rt.ScriptedClient(["x"]))
    assert [state["reward"] for state in scored.state] == [1.0, 1.0]


@pytest.mark.parametrize("reward", ODD_REWARDS, ids=str)
def test_a_parsers_odd_reward_counts_as_zero(reward):
    env = a_world_env(0.5, parser=lambda text: ParseResult(text, reward=reward))
    (state, _) = env.evaluate_sync(rt.ScriptedClient(["x"])).state
    assert state["reward"] == 0.5
    assert "world or a parser" in named(state)


@pytest.mark.parametrize("reward", ODD_REWARDS, ids=str)
def test_a_players_odd_reward_for_the_others_move_counts_as_zero(reward):
    env = ProtocolEnvironment(
        TurnProtocol({"x": an_agent, "o": an_agent}),
        world=lambda row: TurnWorld(reward),
        num_eval=1,
        env_id="turns",
    )
    result = env.evaluate_sync(rt.ScriptedClient(["a"] * 4)).results[0]
    assert result.error is None
    assert [state["reward"] for state in result.states] == [0.0, 0.0]
    assert all("gave the reward" in named(state) for state in result.states)


class Writes(rt.MultiTurnEnv):
    """Calls a function with the state after each answer."""

    def __init__(self, write, **settings):
        settings = {"max_turns": 2, "env_id": "writes", "rubric": rt.Rubric([one])} | settings
        super().__init__(dataset=ROWS, **settings)
        self.write = write

    async def env_response(self, messages, state):
        self.write(state)
        return [{"role": "user", "content": "more"}]


@pytest.mark.parametrize("reward", [each for each in ODD_REWARDS if each is not None], ids=str)
def test_a_reward_that_an_environment_writes_itself_is_checked(reward, tmp_path):
    def write(state):
        state["reward"] = reward

    env = Writes(write, rubric=rt.Rubric())
    _, rows = stored_evaluation(env, tmp_path / "run")
    assert [row["reward"] for row in rows] == [0.0, 0.0]


@pytest.mark.parametrize("reward", [each for each in ODD_REWARDS if each is not None], ids=str)
def test_a_reward_that_an_overridden_rubric_writes_is_checked(reward):
    class Own(rt.Rubric):
        async def score_rollout(self, state):
            state["reward"] = reward

    for rubric in (Own(), rt.RubricGroup([Own(), rt.Rubric([one])])):
        env = rt.SingleTurnEnv(dataset=ROWS, rubric=rubric, env_id="own")
        (state, _) = env.evaluate_sync(rt.ScriptedClient(["x"])).state
        assert state["reward"] == (1.0 if isinstance(rubric, rt.RubricGroup) else 0.0)
        assert "Own" in state["scoring_errors"]
        assert state["error"] is None


WRITES = {
    "error text": lambda s: s.__setitem__("error", "invalid move"),
    "error exception": lambda s: s.__setitem__("error", ValueError("invalid move")),
    "error dict": lambda s: s.__setitem__("error", {"type": "Bad", "message": "invalid move"}),
    "metrics": lambda s: s.__setitem__("metrics", 5),
    "metric": lambda s: s.__setitem__("metrics", {"a": "x", "b": np.float32(1), 3: [1]}),
    "input": lambda s: s.__setitem__("input", None),
    "empty input": lambda s: s.__setitem__("input", {}),
    "row's prompt": lambda s: s.__setitem__("prompt", "another question"),
    "row's task": lambda s: s.__setitem__("task", ["buy", "milk"]),
    "depth": lambda s: s.__setitem__("depth", "deep"),
    "clear": lambda s: s.clear(),
    "timing": lambda s: s.__setitem__("timing", None),
    "times": lambda s: s.__setitem__("timing", {"start_time": "now"}),
    "final": lambda s: s.__setitem__("final_env_response", "bye"),
    "final number": lambda s: s.__setitem__("final_env_response", 5),
    "completion": lambda s: s["trajectory"][-1].__setitem__("completion", None),
    "prompt": lambda s: s["trajectory"][-1].__setitem__("prompt", 5),
    "extras": lambda s: s["trajectory"][-1].__setitem__("extras", 5),
    "counts": lambda s: s["trajectory"][-1]["extras"].__setitem__("num_prompt_tokens", "x"),
    "step reward": lambda s: s["trajectory"][-1].__setitem__("reward", "x"),
    "step advantage": lambda s: s["trajectory"][-1].__setitem__("advantage", "x"),
    "advantage": lambda s: s.__setitem__("advantage", "x"),
    "tokens": lambda s: s["trajectory"][-1].__setitem__("tokens", "x"),
    "step": lambda s: s["trajectory"].append(5),
    "trajectory": lambda s: s.__setitem__("trajectory", "gone"),
    "no trajectory": lambda s: s.pop("trajectory"),
    "agent": lambda s: s.__setitem__("agent", 7),
    "reason": lambda s: (s.__setitem__("truncated", True), s.__setitem__("truncation_reason", 5)),
    "stop": lambda s: s.__setitem__("stop_condition", 5),
    "environment_errors": lambda s: s.__setitem__("environment_errors", "x"),
    "scoring_errors": lambda s: s.__setitem__("scoring_errors", {"x": 5}),
    "tool_errors": lambda s: s.__setitem__("tool_errors", "x"),
    "has_step_rewards": lambda s: s.__setitem__("has_step_rewards", "x"),
    "a depth of its own": lambda s: s.__setitem__("depth", 3),
    "parent": lambda s: s.__setitem__("parent_rollout", "mother"),
    "text completion": lambda s: s["trajectory"][-1].__setitem__("completion", "text"),
    "text prompt": lambda s: s["trajectory"][-1].__setitem__("prompt", "text"),
    "empty step": lambda s: s["trajectory"].append({}),
    "tools": lambda s: s.__setitem__("oai_tools", 5),
    "tool": lambda s: s.__setitem__("oai_tools", [5]),
    "final numbers": lambda s: s.__setitem__("final_env_response", [5]),
    "numbers": lambda s: s.__setitem__("completion", [5]),
    "key": lambda s: s.update({5: 5, (1, 2): 5}),
    "time": lambda s: s["timing"].__setitem__("start_time", 10**400),
    "truncated": lambda s: s.__setitem__("truncated", np.array([])),
    "terminated": lambda s: s.__setitem__("terminated", np.array([False, False])),
    "content": lambda s: s["trajectory"][-1]["completion"][0].update(content=np.array([1, 2])),
    "finish reason": lambda s: s["trajectory"][-1]["extras"].update(finish_reason=["stop"]),
    "temperature": lambda s: s["trajectory"][-1]["extras"].update(temperature=np.array([1, 2])),
    "cycle": lambda s: s.__setitem__("tool_errors", (own := {}) or own.update(own=own) or own),
}
TRUE_OF_TOKENS = {"counts", "tokens"}  # what the audit says of these is so


def read_back(env, path):
    """Evaluate into a run; return the report, the rows, and the audit's findings."""
    with Run.open_or_create(path, config={}, kind="eval") as run:
        report = rt.evaluate(env, rt.ScriptedClient(["x"] * 4), run=run)
    with rt.read_run(path) as data:
        return report, list(data.rollouts().rows()), audit(path).findings


@pytest.mark.parametrize("name", WRITES)
def test_an_odd_value_in_the_state_ends_neither_the_run_nor_the_rollout(name, tmp_path):
    report, rows, findings = read_back(Writes(WRITES[name]), tmp_path / "run")
    assert (report.num_failed, report.reward.mean) == (0, 1.0)
    assert [(row["reward"], row["depth"], row["parent_rollout"]) for row in rows] == [
        (1.0, 0, None)
    ] * 2
    assert name in TRUE_OF_TOKENS or not findings


@pytest.mark.parametrize("kind", ["rollout", "group"])
@pytest.mark.parametrize("name", [name for name in WRITES if name != "step"])
def test_an_odd_value_that_a_reward_function_leaves_costs_no_reward(name, kind, tmp_path):
    def writes(state):
        WRITES[name](state)
        return 1.0

    def writes_all(states):
        return [*map(writes, states)]

    env = Writes(
        lambda state: None,
        rubric=rt.Rubric([writes if kind == "rollout" else writes_all, one], weights=[0.5, 0.5]),
    )
    report, rows, findings = read_back(env, tmp_path / "run")
    assert (report.num_failed, report.reward.mean) == (0, 1.0)
    assert [(row["reward"], row["depth"], row["parent_rollout"]) for row in rows] == [
        (1.0, 0, None)
    ] * 2
    assert name in TRUE_OF_TOKENS or not findings


@pytest.mark.parametrize("name", ["error text", "error exception", "error dict"])
def test_an_error_that_an_environment_writes_after_an_answer_is_named_and_scored(name):
    (state, _) = Writes(WRITES[name]).evaluate_sync(rt.ScriptedClient(["x"] * 3)).state
    assert state["error"] is None
    assert state["reward"] == 1.0
    assert named(state) == "invalid move"


def test_a_task_that_cannot_be_hashed_loses_no_results():
    states = Writes(WRITES["row's task"]).evaluate_sync(rt.ScriptedClient(["x"] * 4)).state
    assert [state["reward"] for state in states] == [1.0, 1.0]


@pytest.mark.parametrize("reward", [None, "nothing"])
def test_a_rubric_that_leaves_no_reward_counts_as_one_that_raises(reward):
    class Lazy(rt.Rubric):
        async def score_rollout(self, state):
            if reward is None:
                state["reward"] = None

    env = rt.SingleTurnEnv(dataset=ROWS, rubric=Lazy(), env_id="lazy")
    (state, _) = env.evaluate_sync(rt.ScriptedClient(["x"])).state
    assert (state["reward"], state["error"]) == (0.0, None)
    assert "left no reward" in state["scoring_errors"]["Lazy"]["message"]


def test_an_error_that_an_environment_writes_before_the_first_answer_fails_the_rollout():
    class Early(rt.SingleTurnEnv):
        async def setup_state(self, state):
            state["error"] = "no board"
            state["final_env_response"] = [{"role": "user", "content": "no board"}]
            return state

    (state, _) = (
        Early(dataset=ROWS, rubric=rt.Rubric([one])).evaluate_sync(rt.ScriptedClient(["x"])).state
    )
    assert state["reward"] is None
    assert state["error"].phase == "environment"
    assert state["error"].message == "no board"


class NumberWorld(PaidWorld):
    """Its second observation is a number, which nobody set a `to_text` for."""

    def __init__(self, is_at_reset):
        super().__init__(1.0)
        self.is_at_reset = is_at_reset
        self.action_space = Text()

    def reset(self, *, seed=None, options=None):
        return 5 if self.is_at_reset else "go", {}

    def step(self, action):
        return 5, 1.0, True, False, {}


class Text:
    """Any text, as Gymnasium's space of this name."""

    def __contains__(self, text):
        return True


def test_an_observation_that_is_not_text_after_an_answer_is_scored_and_named():
    env = rt.GymEnv(lambda: NumberWorld(False), num_eval=1, max_turns=2, env_id="number")
    (state,) = env.evaluate_sync(rt.ScriptedClient(["x"])).state
    assert state["reward"] == 0.0
    assert state["error"] is None
    assert "not text" in named(state)


def test_an_observation_that_is_not_text_at_reset_fails_the_rollout():
    env = rt.GymEnv(lambda: NumberWorld(True), num_eval=1, max_turns=2, env_id="number")
    (state,) = env.evaluate_sync(rt.ScriptedClient(["x"])).state
    assert state["reward"] is None
    assert (state["error"].type, state["error"].kind) == ("ConfigError", "machine")


@pytest.mark.parametrize("message", [{"tool_calls": [5]}, {"tool_calls": 5}, {"content": 5}, {}])
def test_a_message_that_cannot_be_sent_ends_a_rollout_after_an_answer_as_cut(message):
    class Sends(Writes):
        async def env_response(self, messages, state):
            return [{"role": "assistant", "content": ""} | message]

    (state, _) = Sends(None).evaluate_sync(rt.ScriptedClient(["x"] * 4)).state
    assert (state["reward"], state["error"]) == (1.0, None)
    assert bool(state.get("environment_errors")) == (message != {})


class Shares(rt.MultiTurnEnv):
    """All rollouts write into one cache, which every state has."""

    def __init__(self):
        rows = [{"question": f"{i}?", "answer": "12"} for i in range(128)]
        super().__init__(dataset=rows, max_turns=4, rubric=rt.Rubric([one]), env_id="shares")
        self.cache, self.seen = {}, set()

    async def setup_state(self, state):
        state["cache"], state["seen"] = self.cache, self.seen
        return state

    async def env_response(self, messages, state):
        for _ in range(50):
            self.cache[f"{state['example_id']}-{len(self.cache)}"] = "x"
            self.seen.add(len(self.cache))
        await asyncio.sleep(0.001)
        return [{"role": "user", "content": "again"}]


def test_a_state_that_still_changes_while_it_is_stored_ends_nothing(tmp_path):
    with Run.open_or_create(tmp_path / "run", config={}, kind="eval") as run:
        client = rt.ScriptedClient(lambda messages: "x", delay_s=0.002)
        report = rt.evaluate(Shares(), client, run=run)
    assert (report.num_rollouts, report.num_failed, report.reward.mean) == (128, 0, 1.0)


@pytest.mark.parametrize("response", [None, "a text"])
@pytest.mark.parametrize("library", [rt, vf])
def test_an_override_that_returns_no_response_after_an_answer_is_scored(response, library):
    class Forgets(library.SingleTurnEnv):
        async def get_model_response(self, *given, **named):
            await super().get_model_response(*given, **named)
            return response

    rubric = library.Rubric(funcs=[one])
    env = Forgets(dataset=Dataset.from_list(ROWS), rubric=rubric, env_id="forgets")
    report = rt.evaluate(env, rt.ScriptedClient(["x"] * 4))
    assert (report.num_failed, report.reward.mean) == (0, 1.0)


def test_an_override_of_verifiers_that_raises_after_its_answer_is_scored():
    class Parses(vf.SingleTurnEnv):
        async def get_model_response(self, *given, **named):
            answer = await super().get_model_response(*given, **named)
            int(answer.choices[0].message.content)
            return answer

    env = Parses(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[one]))
    report = rt.evaluate(env, rt.ScriptedClient(["x"] * 4))
    assert (report.num_failed, report.reward.mean) == (0, 1.0)


@pytest.mark.parametrize("call", [{"id": "a", "name": "f", "arguments": "{}"}, {"function": None}])
def test_a_tool_call_without_a_function_ends_a_rollout_after_an_answer_as_cut(call):
    class Sends(Writes):
        async def env_response(self, messages, state):
            return [{"role": "assistant", "content": "", "tool_calls": [call]}]

    (state, _) = Sends(None).evaluate_sync(rt.ScriptedClient(["x"] * 4)).state
    assert (state["reward"], state["error"]) == (1.0, None)
    assert "no function" in named(state)


@pytest.mark.parametrize("library", [rt, vf])
def test_a_group_that_an_override_scores_in_part_is_scored_and_named(library):
    class Skips(library.Rubric):
        async def score_group(self, states, *given, **named):
            states[0]["reward"] = 1.0

    def together(states):
        return [1.0] * len(states)

    env = library.SingleTurnEnv(
        dataset=Dataset.from_list(ROWS), rubric=Skips(funcs=[together]), env_id="skips"
    )
    report = rt.evaluate(env, rt.ScriptedClient(["x"] * 8), rollouts_per_example=2)
    assert (report.num_failed, report.reward.mean) == (0, 0.5)


def test_a_refusal_with_403_after_an_answer_is_scored_and_before_it_is_none():
    flagged = ServerError("flagged", status=403, retryable=False)
    for answers, reward in ((["x", "x", flagged, flagged], 1.0), ([flagged] * 2, None)):
        (state, _) = Writes(lambda state: None).evaluate_sync(rt.ScriptedClient(answers)).state
        assert state["reward"] == reward


async def test_a_source_that_returns_dicts_fails_its_rollouts_alone():
    class Source:
        env_id = "dicts"

        async def run_request(self, request, client):
            return [{"input": request.input, "reward": 1.0, "trajectory": []}]

    request = a_request(Writes(None))
    (result,) = await RolloutEngine(Source(), rt.ScriptedClient(["x"])).run_all([request])
    assert "State(...)" in result.error.message
