"""Weights of reward functions, noted in a run when it starts and found for each rollout."""

import rolltree as rt
from rolltree.environments.rubrics import PerAgentRubric, RubricGroup
from rolltree.records import reward_parts
from rolltree.store import Run, StoredRollout
from rolltree.store.weights import META, note_weights, noted_weights


def right():
    return 1.0


def form():
    return 1.0


def length():
    return 1.0


class Source:
    env_id = "sums"

    def __init__(self, rubric):
        self.rubric = rubric


def found(run, **row):
    known = {"env_id": "sums", "task": "", "agent": "", "created_at": 1e12}
    return noted_weights(run.meta.get(META), **known | row)


def test_functions_of_a_rubric_and_of_a_group_of_rubrics(tmp_path):
    with Run.create(tmp_path / "a") as run:
        assert found(run) is None
        note_weights(Source(rt.Rubric([right, length], [1.0, 0.0])), run)
        assert found(run) == {"right": 1.0, "length": 0.0}
        assert found(run, env_id="other") is None
    with Run.create(tmp_path / "b") as run:
        note_weights(Source(RubricGroup([rt.Rubric([right]), rt.Rubric([form], [0.5])])), run)
        assert found(run, agent="agent") == {"right": 1.0, "form": 0.5}


def test_agents_and_tasks_have_their_own(tmp_path):
    child = rt.Rubric([right], [0.25])
    with Run.create(tmp_path / "a") as run:
        note_weights(Source(PerAgentRubric(rt.Rubric([right]), {"child": child})), run)
        assert found(run, agent="parent") == {"right": 1.0}
        assert found(run, agent="child") == {"right": 0.25}
    row = {"question": "?", "answer": "!"}
    one = rt.SingleTurnEnv(dataset=[row], rubric=rt.Rubric([right]), env_id="one")
    two = rt.SingleTurnEnv(dataset=[row], rubric=rt.Rubric([right], [2.0]), env_id="two")
    inner = rt.EnvGroup([one, two], env_names=["a", "b"], env_id="inner")
    with Run.create(tmp_path / "b") as run:
        note_weights(rt.EnvGroup([inner, two], env_names=["x", "y"], env_id="sums"), run)
        assert found(run, task="x/a/task") == {"right": 1.0}
        assert found(run, task="x/b") == {"right": 2.0}
        assert found(run, task="y") == {"right": 2.0}
        assert found(run, task="z") == {}
    with Run.create(tmp_path / "c") as run:
        note_weights(rt.EnvGroup([one, two], env_names=["a", "a/b"], env_id="sums"), run)
        assert found(run, task="a/b/own") == {"right": 2.0}
        assert found(run, task="a/c") == {"right": 1.0}


def test_other_weights_hold_from_then_on(tmp_path):
    with Run.create(tmp_path) as run:
        note_weights(Source(rt.Rubric([right])), run)
        note_weights(Source(rt.Rubric([right])), run)
        (first,) = run.meta[META]
        note_weights(Source(rt.Rubric([right], [3.0])), run)
        assert len(run.meta[META]) == 2
        assert found(run, created_at=first["since"]) == {"right": 1.0}
        assert found(run) == {"right": 3.0}
        assert found(run, created_at=first["since"] - 1) is None
        note_weights(object(), run)  # a source without a rubric
        assert len(run.meta[META]) == 2


def test_a_name_that_looks_like_a_secret_keeps_its_weight(tmp_path):
    def api_key(): ...

    with Run.create(tmp_path) as run:
        note_weights(Source(rt.Rubric([api_key], [0.5])), run)
        assert found(run) == {"api_key": 0.5}


def test_parts_add_up_to_the_reward(tmp_path):
    with Run.create(tmp_path) as run:
        note_weights(Source(rt.Rubric([right, form, length], [1.0, -0.5, 0.0])), run)
        metrics = {"right": 0.1, "form": 0.2, "length": 7.0, "num_turns": 2.0}
        row = StoredRollout(request_id="a", env_id="sums", reward=0.0, metrics=metrics)
        told = reward_parts(run, row)
        assert [tuple(each.values()) for each in told["functions"]] == [
            ("right", 0.1, 1.0, 0.1),
            ("form", 0.2, -0.5, -0.1),
        ]
        assert (told["rest"], told["is_recorded"]) == (0.0, True)
        assert told["metrics"] == {"length": 7.0, "num_turns": 2.0}
        earned = StoredRollout(request_id="a", env_id="sums", reward=2.5, metrics=metrics)
        assert reward_parts(run, earned)["rest"] == 2.5
        failed = {"right": None, "form": 1.0}
        told = reward_parts(run, StoredRollout(request_id="a", env_id="sums", metrics=failed))
        assert told["functions"][0]["contribution"] is None
        assert told["rest"] is None
        other = StoredRollout(request_id="a", env_id="old", reward=1.0, metrics=metrics)
        assert reward_parts(run, other) == {
            "is_recorded": False,
            "functions": [],
            "rest": None,
            "metrics": metrics,
        }


def test_an_evaluation_and_its_rescoring_note_them(tmp_path):
    env = rt.SingleTurnEnv(
        dataset=[{"question": "1 + 1 =", "answer": "2"}],
        rubric=rt.Rubric([right, form], [1.0, 0.25]),
        env_id="sums",
    )
    client = rt.ScriptedClient(["2"])
    with Run.create(tmp_path / "run") as run:
        rt.evaluate(env, client, run=run)
        (row,) = run.rollouts()
        told = reward_parts(run, row)
    assert [each["contribution"] for each in told["functions"]] == [1.0, 0.25]
    assert (told["rest"], row.reward) == (0.0, 1.25)
    rt.rescore(tmp_path / "run", rubric=rt.Rubric([form], [4.0]), run_dir=tmp_path / "new")
    with Run.open(tmp_path / "new", "r") as run:
        (row,) = run.rollouts()
        assert reward_parts(run, row)["functions"][0]["contribution"] == row.reward == 4.0
