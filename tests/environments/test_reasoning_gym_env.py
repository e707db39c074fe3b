import pytest
from env_scripts import ScriptedModel, assistant

import rolltree as rt
from rolltree.environments import ReasoningGymEnv
from rolltree.values.errors import ConfigError

pytest.importorskip(
    "reasoning_gym", reason="reasoning-gym has no wheel for one of its needs: no C compiler here"
)


def wrapped(answer):
    return f"<answer>{answer}</answer>"


async def score(env, row, said):
    state = rt.State(
        input=row,
        trajectory=[],
        completion=assistant(said),
        reward=None,
        metrics=None,
        error=None,
    )
    await env.rubric.score_rollout(state)
    return state["reward"]


async def test_the_tasks_own_scores_are_the_reward():
    env = ReasoningGymEnv({"chain_sum": {"max_terms": 3}, "spell_backward": {}}, num_eval=6)
    assert [row["task"] for row in env.eval_dataset[:3]] == [
        "chain_sum",
        "spell_backward",
        "chain_sum",
    ]
    for split in (env.dataset[:4], env.eval_dataset[:4]):
        for row in split:
            assert await score(env, row, wrapped(row["answer"])) == 1.0
            assert await score(env, row, wrapped("nonsense")) < 0.5
            assert (
                await score(env, row, row["answer"]) == 0.0
            )  # not in the place that was asked for
            assert await score(env, row, "") == 0.0


async def test_a_task_that_accepts_several_answers():
    env = ReasoningGymEnv("countdown", num_train=1, num_eval=1)
    row = env.eval_dataset[0]
    entry = env.eval_sets["countdown"][0]
    assert entry["metadata"]["expression"] in row["answer"]
    assert await score(env, row, wrapped(f"({entry['metadata']['expression']})")) == 1.0


def test_rows_depend_on_the_seed_and_splits_do_not_overlap():
    def questions(seed, split="dataset"):
        env = ReasoningGymEnv("chain_sum", num_train=50, num_eval=50, seed=seed)
        return getattr(env, split)["question"]

    assert questions(1) == questions(1) != questions(2)
    assert not set(questions(1)) & set(questions(1, "eval_dataset"))
    few = ReasoningGymEnv(
        {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}, num_eval=30
    )
    assert few.num_examples("train") < 500
    assert not set(few.dataset["question"]) & set(few.eval_dataset["question"])


async def test_it_runs():
    env = ReasoningGymEnv("spell_backward", num_train=2, num_eval=4)
    rows = {row["prompt"][-1]["content"]: row["answer"] for row in env.eval_dataset}
    model = ScriptedModel(lambda messages: wrapped(rows[messages[-1]["content"]]))
    results = await env.evaluate(model, "m")
    assert results.metadata.avg_metrics == {"task_score": 1.0, "format_reward": 1.0}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("chain_sums", "Did you mean 'chain_sum'"),
        ({"chain_sum": {"max_term": 3}}, "refuses its settings"),
        ({"chain_sum": {"min_terms": 9, "max_terms": 1}}, "refuses its settings"),
        ([], "no tasks"),
    ],
)
def test_wrong_settings(tasks, message):
    with pytest.raises(ConfigError, match=message):
        ReasoningGymEnv(tasks)
