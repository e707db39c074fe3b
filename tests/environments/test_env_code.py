"""Which files an environment's code is in."""

import rolltree as rt
from rolltree.environments.code_hashes import changed_code, code_hashes
from rolltree.store import StoredRollout


def own(completion):
    return 1.0


def test_reward_functions_and_classes_name_their_files():
    env = rt.SingleTurnEnv(dataset=[{"question": "q"}], rubric=rt.Rubric([own]))
    assert list(code_hashes(env)) == ["environments/test_env_code.py"]
    plain = rt.SingleTurnEnv(dataset=[{"question": "q"}])
    assert code_hashes(plain) == {}  # rolltree's own code is the version's business


def test_it_is_said_once_and_only_after_the_first_rollout(tmp_path, monkeypatch):
    env = rt.SingleTurnEnv(dataset=[{"question": "q"}], rubric=rt.Rubric([own]))
    hashes = {"a/a.py": "1"}
    monkeypatch.setattr("rolltree.environments.code_hashes.code_hashes", lambda source: hashes)
    with rt.Run.create(tmp_path / "run") as run:
        assert changed_code(env, run) is None
        hashes = {"a/a.py": "2"}
        assert changed_code(env, run) is None  # nothing was played with the old one
        run.add_rollouts([StoredRollout(request_id="r")])
        hashes = {"a/a.py": "2", "a/b.py": "3"}
        assert "(a/b.py)" in changed_code(env, run)
        assert changed_code(env, run) is None
