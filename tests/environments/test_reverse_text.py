from pathlib import Path

import pytest
from env_scripts import ScriptedModel, assistant

import rolltree as rt

FOLDER = Path(__file__).parents[2] / "environments" / "reverse_text"


@pytest.fixture
def env():
    return rt.load_environment(FOLDER, num_train=20, num_eval=10)


def test_rows_are_generated_and_the_splits_are_apart(env):
    assert (env.num_examples("train"), env.num_examples("eval")) == (20, 10)
    train, held_out = set(env.dataset["answer"]), set(env.eval_dataset["answer"])
    assert len(train) == 20
    assert len(held_out) == 10
    assert not train & held_out
    row = env.dataset[0]
    assert row["prompt"][-1]["content"] == row["answer"][::-1]


def test_the_seed_decides_the_rows(env):
    again = rt.load_environment(FOLDER, num_train=20, num_eval=10)
    other = rt.load_environment(FOLDER, num_train=20, num_eval=10, seed=1)
    assert again.dataset["answer"] == env.dataset["answer"] != other.dataset["answer"]


def test_the_answer_is_not_in_the_prompt(env):
    for row in env.dataset:
        prompt = "".join(message["content"] for message in row["prompt"])
        assert row["answer"] not in prompt


def test_more_rows_than_texts():
    with pytest.raises(rt.ConfigError, match="different texts"):
        rt.load_environment(FOLDER, num_train=500, min_words=1, max_words=1)


@pytest.mark.parametrize(
    ("said", "similarity", "exact"),
    [
        ("<reversed_text>\ncba\n</reversed_text>", 1.0, 1.0),
        ("<reversed_text>cb</reversed_text>", 0.8, 0.0),  # 2 * 2 matched / (2 + 3)
        ("<reversed_text></reversed_text>", 0.0, 0.0),
        ("cba", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
async def test_rewards(env, said, similarity, exact):
    state = rt.State(
        input={"prompt": [], "answer": "cba", "example_id": 0, "task": "t"},
        trajectory=[],
        completion=assistant(said),
        reward=None,
        metrics=None,
        error=None,
    )
    await env.rubric.score_rollout(state)
    assert state["reward"] == pytest.approx(similarity)
    assert state["metrics"]["exact"] == exact


async def test_it_runs(env):
    def reverse(messages):
        return f"<reversed_text>\n{messages[-1]['content'][::-1]}\n</reversed_text>"

    results = await env.evaluate(ScriptedModel(reverse), "m")
    assert results.metadata.avg_reward == 1.0
    assert results.metadata.avg_metrics == {
        "similarity": 1.0,
        "exact": 1.0,
        "format_reward": 1.0,
    }
