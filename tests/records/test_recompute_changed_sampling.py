"""The audit of calls with settings of their own: another distribution, another ending."""

import rolltree as rt
from rolltree.store import Run

MESSAGES = [{"role": "user", "content": "hello"}]


def evaluated(path, *samplings):
    """Store two rollouts of an agent that makes a call with each of these settings."""

    async def agent(session, state):
        client = rt.OpenAIClient(session.base_url, "any", api_key=session.api_key)
        try:
            for sampling in samplings:
                await client.chat(MESSAGES, sampling={"max_tokens": 4, **sampling})
        finally:
            await client.aclose()

    environment = rt.ProgramEnv(
        agent, dataset=[{"question": "q"}], rubric=rt.Rubric([lambda state: 1.0])
    )
    client = rt.local_client(*rt.load_model("tiny"))
    with Run.open_or_create(path, config={"model": "tiny"}, kind="eval") as run:
        rt.evaluate(environment, client, num_examples=1, rollouts_per_example=2, run=run)


def test_a_call_with_another_distribution_is_left_out(tmp_path):
    evaluated(tmp_path / "mixed", {}, {"top_p": 0.3, "presence_penalty": 1.0})
    report = rt.audit(tmp_path / "mixed", recompute=2)
    assert report.ok, report.findings
    assert report.recomputed["num_tokens"] == 8  # two rollouts with a plain call of four tokens


def test_stop_strings_of_an_agent_end_its_answers(tmp_path):
    stops = {"stop": list("abcdefghijklmnopqrstuvwxyz"), "max_tokens": 40}
    evaluated(tmp_path / "run", stops, stops, stops)
    with rt.read_run(tmp_path / "run") as data:
        assert "stop" in {row["finish_reason"] for row in data.calls().rows()}
    assert rt.audit(tmp_path / "run").findings == ()
