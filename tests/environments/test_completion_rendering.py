import pytest
from env_scripts import assistant, user
from hypothesis import given
from hypothesis import strategies as st

from rolltree.environments.completion import appended_messages, render_completion

SYSTEM = [{"role": "system", "content": "s"}]
PROMPT = [*SYSTEM, *user("q")]


def step(prompt, completion):
    return {"prompt": prompt, "completion": completion}


def test_no_steps_no_completion():
    assert render_completion(PROMPT, []) == []
    assert render_completion("q", []) == ""


def test_one_step():
    assert render_completion(PROMPT, [step(PROMPT, assistant("a"))]) == assistant("a")


WORDS = st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=6)


@given(WORDS)
def test_growing_histories_give_the_last_conversation_without_the_prompt(turns):
    history, steps = list(PROMPT), []
    for said, answer in turns:
        steps.append(step(list(history), assistant(said)))
        history = [*history, *assistant(said), *user(answer)]
    rendered = render_completion(PROMPT, steps)
    expected = [*steps[-1]["prompt"], *steps[-1]["completion"]] if steps else PROMPT
    assert rendered == expected[len(PROMPT) :]


@given(WORDS)
def test_whatever_is_rewritten_every_answer_appears_once_in_order(turns):
    steps = [step([*SYSTEM, *user(answer)], assistant(said)) for said, answer in turns]
    rendered = render_completion(PROMPT, steps)
    said = [message["content"] for message in rendered if message["role"] == "assistant"]
    assert said == [said for said, _ in turns]


def test_a_window_that_drops_old_turns():
    steps = [
        step(PROMPT, assistant("a")),
        step([*PROMPT, *assistant("a"), *user("u1")], assistant("b")),
        step([*SYSTEM, *assistant("b"), *user("u2")], assistant("c")),
    ]
    assert render_completion(PROMPT, steps) == [
        *assistant("a"),
        *user("u1"),
        *assistant("b"),
        *user("u2"),
        *assistant("c"),
    ]


def test_reasoning_stripped_from_the_history():
    steps = [
        step(PROMPT, assistant("<think>x</think>a")),
        step([*PROMPT, *assistant("a"), *user("u")], assistant("b")),
    ]
    assert render_completion(PROMPT, steps) == [
        *assistant("<think>x</think>a"),
        *user("u"),
        *assistant("b"),
    ]


def test_a_summary_replaces_everything():
    steps = [
        step(PROMPT, assistant("a")),
        step(user("summary of it all"), assistant("b")),
    ]
    assert render_completion(PROMPT, steps) == [
        *assistant("a"),
        *user("summary of it all"),
        *assistant("b"),
    ]


def test_the_same_prompt_again_adds_nothing():
    steps = [step(PROMPT, assistant("a")), step(PROMPT, assistant("b"))]
    assert render_completion(PROMPT, steps) == [*assistant("a"), *assistant("b")]


def test_the_final_response_of_the_environment_comes_last():
    rendered = render_completion(PROMPT, [step(PROMPT, assistant("a"))], user("bye"))
    assert rendered == [*assistant("a"), *user("bye")]


def test_strings():
    steps = [step("q", " a"), step("q a and", " b")]
    assert render_completion("q", steps) == " a and b"
    assert render_completion("q", steps, " end") == " a and b end"


@pytest.mark.parametrize(
    ("before", "prompt", "new"),
    [
        ([*PROMPT, *assistant("a")], [*PROMPT, *assistant("a"), *user("u")], user("u")),
        ([*PROMPT, *assistant("a")], user("other"), user("other")),
        ([*PROMPT, *assistant("a")], [*PROMPT, *assistant("a")], []),
        ("ab", "abc", "c"),
    ],
)
def test_appended_messages(before, prompt, new):
    assert appended_messages(before, prompt) == new
