"""What a server, a judge's server or a sandbox failed is run again when the evaluation goes on."""

import pytest

import rolltree as rt
from rolltree.evaluation import evaluate_async
from rolltree.inference import OpenAIClient, RetryPolicy
from rolltree.insight.page.export import export_page
from rolltree.insight.page.rollout_view import rollout_view
from rolltree.records.overview import run_summary
from rolltree.sandbox import SandboxLevel
from rolltree.store import Run
from rolltree.testing import HttpFault, ScriptedClient, ScriptedServer
from rolltree.values.errors import SandboxError

ROWS = [{"question": f"say {number}", "answer": ""} for number in range(4)]


OPEN = []


@pytest.fixture(autouse=True)
async def clients():
    yield
    while OPEN:
        await OPEN.pop().aclose()


def client_of(url):
    OPEN.append(OpenAIClient(url, "scripted", retry=RetryPolicy(max_retries=0)))
    return OPEN[-1]


class Backend:
    """Makes `num_good` sandboxes and fails from then on, as a daemon that died."""

    def __init__(self, num_good):
        self.num_good = num_good
        self.id, self.level = "only", SandboxLevel("none")

    async def create(self, *, limits=None):
        self.num_good -= 1
        if self.num_good < 0:
            raise SandboxError("the daemon is gone")
        return self

    async def close(self):
        pass


def with_server(server, dies):
    rubric = rt.Rubric([lambda completion: 1.0])
    return rt.SingleTurnEnv(dataset=ROWS, rubric=rubric, env_id="e"), client_of(server.base_url)


def with_judge(server, dies):
    async def correct(judge, prompt, completion, answer, state):
        return float(await judge(prompt, completion, answer, state) == "ok")

    rubric = rt.JudgeRubric([correct], judge_client=client_of(server.base_url))
    env = rt.SingleTurnEnv(dataset=ROWS, rubric=rubric, env_id="e")
    return env, ScriptedClient(lambda messages: messages[-1]["content"])


def with_sandbox(server, dies):
    backend = Backend(2 if dies else 9)
    rubric = rt.Rubric([lambda completion: 1.0])
    env = rt.SandboxEnv(sandbox=backend, shell=False, dataset=ROWS, rubric=rubric, env_id="e")
    return env, ScriptedClient(lambda messages: "ok")


@pytest.mark.parametrize("make", [with_server, with_judge, with_sandbox])
async def test_a_resumed_evaluation_runs_again_what_it_lost(make, tmp_path):
    with Run.create(tmp_path / "run") as run:
        with ScriptedServer(
            lambda messages: "ok", faults=lambda call: HttpFault(status=503) if call > 1 else None
        ) as server:
            env, client = make(server, dies=True)
            first = await evaluate_async(env, client, run=run, max_concurrent=1)
        assert (first.num_rollouts, first.num_failed) == (4, 2)
        with ScriptedServer(lambda messages: "ok") as server:
            env, client = make(server, dies=False)
            again = await evaluate_async(env, client, run=run, max_concurrent=1)
        assert (again.num_rollouts, again.num_resumed, again.num_failed) == (4, 2, 0)
        assert again.reward.mean == 1.0
        assert sum(each.data["times"] for each in run.events("retried")) == 2
        assert run.num_rollouts(status="ok") == run.num_rollouts() == 4


async def test_a_compared_group_with_a_lost_member_is_run_again_and_stored_whole(tmp_path):
    async def share(completions, states) -> list[float]:
        return [float(len(completions))] * len(completions)

    rubric = rt.Rubric([share])
    env = rt.SingleTurnEnv(dataset=ROWS[:2], rubric=rubric, env_id="e")
    options = {"rollouts_per_example": 2, "max_concurrent": 1}
    with Run.create(tmp_path / "run") as run:
        with ScriptedServer(
            lambda messages: "ok", faults=lambda call: HttpFault(status=503) if call == 3 else None
        ) as server:
            await evaluate_async(env, client_of(server.base_url), run=run, **options)
        assert sorted(row.reward or 0.0 for row in run.rollouts()) == [0.0, 1.0, 2.0, 2.0]
        with ScriptedServer(lambda messages: "ok") as server:
            again = await evaluate_async(env, client_of(server.base_url), run=run, **options)
        assert (again.num_resumed, again.num_failed) == (2, 0)
        assert [row.reward for row in run.rollouts()] == [2.0] * 4
        assert again.outcomes.values("reward") == [2.0] * 4


async def test_a_dead_judge_fills_neither_store_nor_page(tmp_path):
    """However often a rollout is retried, it takes as much room as one."""
    env, client = dead_judge()
    path, requests, times = tmp_path / "run", 16, 12
    with Run.create(path, config={"model": "m"}, kind="eval") as run:
        await evaluate_async(env, client, num_examples=4, rollouts_per_example=4, run=run)
        rows = list(run.rollouts())
        assert len(rows) == requests
        assert {row.error_type for row in rows} == {"ConnectionFailed"}
        for _ in range(times):
            run.add_rollouts(rows, replace_failed=True)
        (event,) = run.events("retried")
        assert event.data["times"] == times * requests
        assert event.data["cause"] == ["ConnectionFailed", "scoring", "good"]
        (notice,) = run_summary(run)["notices"]
        assert notice["times"] == times * requests
        assert notice["text"].endswith("had failed with ConnectionFailed in good ran again.")
        assert max(len(str(rollout_view(run, row.request_id, 0))) for row in rows) < 20_000
    # SQLite's empty file has its tables and indexes.
    Run.create(tmp_path / "bare", config={"model": "m"}, kind="eval").close()
    size, empty = ((each / "run.db").stat().st_size for each in (path, tmp_path / "bare"))
    assert (size - empty) / requests < 10_000
    found = export_page(path, tmp_path / "page.html")
    assert found.num_rollouts == requests
    assert found.num_bytes < 500_000 + 25_000 * requests


def dead_judge():
    """Return an environment whose judge's port is closed."""
    nobody = client_of("http://127.0.0.1:9/v1")

    async def good(judge, prompt, completion, answer, state):
        return float(await judge(prompt, completion, answer, state) == "yes")

    rubric = rt.JudgeRubric([good], judge_client=nobody)
    return rt.SingleTurnEnv(dataset=ROWS, rubric=rubric, env_id="e"), ScriptedClient(["a b c"])
