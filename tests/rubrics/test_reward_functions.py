import asyncio
import functools
import threading
from pathlib import Path

import pytest
from rubric_states import a_state

import rolltree as rt
from rolltree.environments.rubrics import RewardFunction, Rubric, run_inline
from rolltree.environments.rubrics.functions import (
    call_all,
    group_arguments,
    rollout_arguments,
)
from rolltree.values.errors import ConfigError
from rolltree.values.steps import as_number
from rolltree.values.types import ErrorRecord, State


def ask(func, state=None, objects=None, **kind):
    """Return the outcome of one function on one state."""
    state = state or a_state()
    function = RewardFunction.of(func, 1.0, **kind)
    return asyncio.run(call_all([(function, rollout_arguments(state, objects or {}), state)]))[0]


def test_arguments_are_chosen_by_name():
    def seen(answer, completion, prompt, task, info, example_id, state):
        assert completion[0]["content"] == "4"
        assert prompt[0]["content"] == "2 + 2?"
        assert isinstance(state, State)
        return [answer, task, info["level"], example_id]

    assert ask(seen, kind="rollout") == ["4", "sum", 1, 7]


def test_keys_of_the_state_can_be_asked_for():
    assert ask(lambda guesses: guesses, a_state(guesses=3)) == 3


def test_objects_of_the_rubric_can_be_asked_for():
    assert ask(lambda judge: judge + "!", objects={"judge": "me"}) == "me!"


def test_optional_arguments_keep_their_default():
    assert ask(lambda answer, scale=2.0: scale) == 2.0
    assert ask(lambda answer, scale=2.0: scale, a_state(scale=3.0)) == 3.0


def test_kwargs_get_everything_standard():
    def everything(answer, **rest):
        return sorted(rest)

    names = ask(everything)
    assert names == ["answer", "completion", "example_id", "info", "prompt", "state", "task"][1:]


def test_a_missing_info_is_empty_and_a_missing_answer_an_error():
    state = a_state()
    del state["answer"], state["info"]
    assert ask(lambda info, answer="mine": (answer, info), state) == ("mine", {})
    assert "no column 'answer'" in ask(lambda answer: 1.0, state).message
    assert "no column 'answer'" in ask(lambda answers: [1.0], state).message


def test_an_unknown_argument_is_recorded_with_the_nearest_name():
    outcome = ask(lambda completions_: 1.0)
    assert isinstance(outcome, ErrorRecord)
    assert "asks for 'completions_'" in outcome.message
    assert "Did you mean 'completion'" in outcome.message
    assert outcome.phase == "scoring"


def test_exceptions_are_recorded_with_their_traceback():
    def broken(answer):
        return 1 / 0

    outcome = ask(broken)
    assert outcome.type == "ZeroDivisionError"
    assert "in broken" in outcome.traceback


def raises(text):
    raise ValueError(text)


def nested(answer):
    return raises("deep")


async def later(answer):
    return raises("late")


def silent(answer):
    """Returns None."""


def typo(completion_):
    """Asks for what nobody has."""


class Scorer:
    def __call__(self, answer):
        return raises("object")

    def method(self, answer):
        return raises("method")


@pytest.mark.parametrize(
    ("func", "name", "at"),
    [
        (nested, "nested", 'return raises("deep")'),
        (later, "later", 'return raises("late")'),
        (silent, "silent", "def silent"),
        (typo, "typo", "def typo"),
        (functools.partial(nested), "nested", 'return raises("deep")'),
        (functools.partial(raises, "bound"), "raises", "raise ValueError"),
        (Scorer(), "Scorer", 'return raises("object")'),
        (Scorer().method, "method", 'return raises("method")'),
    ],
)
def test_a_scoring_error_names_function_file_and_line(func, name, at):
    state = a_state()
    asyncio.run(Rubric([func]).score_rollout(state))
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if at in text)
    where = f"reward function {name!r}, tests/rubrics/test_reward_functions.py:{line}: "
    # First: whoever shows the message cuts a long one.
    assert state["scoring_errors"][name]["message"].startswith(where)


def test_a_scoring_error_of_a_file_elsewhere_has_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"reward function 'nested', {__file__}:" in ask(nested).message


def test_names_of_lambdas_partials_and_objects():
    def scale(answer, by):
        return by

    class Judge:
        def __call__(self, answer):
            return 1.0

    assert RewardFunction.of(scale, 1.0).name == "scale"
    assert RewardFunction.of(functools.partial(scale, by=2.0), 1.0).name == "scale"
    assert RewardFunction.of(Judge(), 1.0).name == "Judge"
    assert ask(functools.partial(scale, by=2.0)) == 2.0
    assert ask(Judge()) == 1.0


def test_methods_and_async_callables():
    class Judge:
        async def score(self, answer):
            return 0.25

        async def __call__(self, answer):
            return 0.5

    judge = Judge()
    assert RewardFunction.of(judge.score, 1.0).is_async
    assert RewardFunction.of(judge, 1.0).is_async
    assert (ask(judge.score), ask(judge)) == (0.25, 0.5)


def test_a_plain_function_may_return_an_awaitable():
    async def later():
        return 0.75

    async def failing():
        raise KeyError("late")

    assert ask(lambda answer: later()) == 0.75
    assert ask(run_inline(lambda answer: later())) == 0.75
    assert ask(lambda answer: failing()).type == "KeyError"


def test_positional_only_arguments_are_refused():
    def positional(answer, /):
        return 1.0

    with pytest.raises(ConfigError, match="positional-only"):
        RewardFunction.of(positional, 1.0)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weights_must_be_finite(weight):
    with pytest.raises(ConfigError, match="weight"):
        RewardFunction.of(lambda answer: 1.0, weight)


def returns_typing_list(answer) -> "list[float]": ...
def returns_list(answer) -> list[float]: ...
def returns_float(answer) -> float: ...
def asks_plural(completions): ...
def asks_states(states): ...


@pytest.mark.parametrize(
    ("func", "kind"),
    [
        (returns_typing_list, "group"),
        (returns_list, "group"),
        (returns_float, "rollout"),
        (asks_plural, "group"),
        (asks_states, "group"),
        (lambda state: 1.0, "rollout"),
    ],
)
def test_group_functions_are_told_apart(func, kind):
    assert RewardFunction.of(func, 1.0).kind == kind


def test_group_arguments_have_one_entry_per_rollout():
    states = [a_state("3"), a_state("4")]
    known = group_arguments(states, {"parser": "p"})
    assert known["states"] == states
    assert [c[0]["content"] for c in known["completions"]] == ["3", "4"]
    assert known["answers"] == ["4", "4"]
    assert known["example_ids"] == [7, 7]
    assert known["parser"] == "p"


@pytest.mark.parametrize(("value", "number"), [(1, 1.0), (True, 1.0), (False, 0.0), (0.5, 0.5)])
def test_scores_become_floats(value, number):
    assert as_number(value) == number
    assert type(as_number(value)) is float


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), [1.0], {}])
def test_what_is_no_score(value):
    with pytest.raises((TypeError, ValueError)):
        as_number(value)


async def test_synchronous_functions_leave_the_event_loop_free():
    released = threading.Event()

    def slow(answer):
        return float(released.wait(60))

    async def release():
        await asyncio.sleep(0.01)
        released.set()

    releasing = asyncio.create_task(release())
    state = a_state()
    await Rubric([slow]).score_rollout(state)
    assert state["reward"] == 1.0
    await releasing


async def test_inline_functions_stay_in_the_event_loop():
    threads = []

    def here(answer):
        threads.append(threading.current_thread())
        return 1.0

    def marked(answer):
        return here(answer)

    state = a_state()
    known = rollout_arguments(state, {})
    for function in (
        RewardFunction.of(here, 1.0),
        RewardFunction.of(here, 1.0, runs_inline=True),
        RewardFunction.of(run_inline(marked), 1.0),
    ):
        await call_all([(function, known, state)])
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [False, True, True]


async def test_asynchronous_functions_run_side_by_side():
    arrived = asyncio.Event()

    async def first(answer):
        await asyncio.wait_for(arrived.wait(), 5)
        return 1.0

    async def second(answer):
        arrived.set()
        return 2.0

    rubric = Rubric([first, second])
    state = a_state()
    await rubric.score_rollout(state)
    assert state["reward"] == 3.0


@pytest.mark.parametrize("answers", [["lucky"], ["x"], []])
def test_what_only_some_answers_write_costs_no_reward(answers):
    class Writes(rt.SingleTurnEnv):
        @rt.cleanup
        async def remember(self, state):
            if state["completion"] and state["completion"][-1]["content"] == "lucky":
                state["luck"] = 1.0

    def lucky(luck):
        return luck

    env = Writes(dataset=[{"question": "?"}], rubric=rt.Rubric([lucky]), env_id="luck")
    (state,) = env.evaluate_sync(rt.ScriptedClient(answers)).state
    if answers:
        assert (state["reward"], state["error"]) == (float(answers == ["lucky"]), None)
        assert ("lucky" in (state.get("scoring_errors") or {})) == (answers != ["lucky"])
    else:
        assert state["reward"] is None
