"""A server that fails in every way: each rollout ends as a result or as a typed error."""

from collections import Counter

import rolltree as rt
from rolltree.evaluation import evaluate_async
from rolltree.inference import OpenAIClient, RetryPolicy
from rolltree.store import Run
from rolltree.testing import HttpFault, ScriptedServer

FAULTS = (
    HttpFault(status=429, retry_after_s=0.01),
    HttpFault(status=500),
    HttpFault(reset=True),
    HttpFault(body="broken"),
    HttpFault(body="truncated"),
    HttpFault(delay_s=2.0),
)


class Counting(rt.MultiTurnEnv):
    """Asks twice; counts its cleanups per rollout."""

    def __init__(self):
        rows = [{"question": f"say {i}", "answer": ""} for i in range(28)]
        rubric = rt.Rubric([lambda completion: 1.0])
        super().__init__(eval_dataset=rows, rubric=rubric, max_turns=2, env_id="counting")
        self.cleaned = Counter()

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "again"}]

    @rt.cleanup
    async def count(self, state):
        self.cleaned[state["example_id"]] += 1


async def run_once(env, run, server, timeout_s=1.0, **options):
    client = OpenAIClient(
        server.base_url,
        "scripted",
        timeout_s=timeout_s,
        retry=RetryPolicy(max_retries=0, first_wait_s=0.0),
    )
    try:
        return await evaluate_async(env, client, run=run, max_concurrent=8, **options)
    finally:
        await client.aclose()


async def test_every_rollout_ends_as_a_result_or_a_typed_error(tmp_path):
    env = Counting()
    # every third call fails, each time in another way
    faults = lambda number: FAULTS[number // 3 % len(FAULTS)] if number % 3 == 2 else None  # noqa: E731
    with (
        ScriptedServer(lambda messages: "ok", faults=faults) as server,
        Run.create(tmp_path) as run,
    ):
        report = await run_once(env, run, server)
        rows = list(run.rollouts())
        assert run.num_rollouts() == report.num_rollouts == 28
        assert 0 < report.num_failed < 28
        assert {row.error_type for row in rows if row.status == "error"} <= {
            "ServerError", "ConnectionFailed", "BadResponse",
        }  # fmt: skip
        assert all(row.errors[0]["traceback"] for row in rows if row.status == "error")
        assert all((row.reward is None) == (row.status == "error") for row in rows)
        assert report.reward.mean == 1.0  # of those that finished; failures are not zeros
        assert set(env.cleaned.values()) == {1}
        assert len(env.cleaned) == 28

        server.faults.__init__(())  # the server recovers
        again = await run_once(env, run, server, timeout_s=60.0, retry_failed=True)
        assert again.num_failed == 0
        assert again.num_resumed == 28 - report.num_failed
        retried = run.events("retried")
        assert sum(each.data["times"] for each in retried) == report.num_failed
