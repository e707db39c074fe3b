"""The rollout benchmark does the work it measures, and its memory bar can fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench_kit import load


@pytest.fixture(scope="module")
def bench() -> Any:
    return load("rollouts")


def test_every_id_and_logprob_of_the_server_arrives(bench: Any) -> None:
    transport = bench.ScriptedTransport(4)
    results = asyncio.run(bench.run_rolltree(9, 4, transport))
    bench.check_results(results, 9, 4)
    assert transport.num_answers == 36
    for index, state in enumerate(results.state):
        answers = transport.answers[index % bench.NUM_VARIANTS]
        for step, answer in zip(state["trajectory"], answers, strict=True):
            sent = bench.json.loads(b"{" + answer)
            choice = sent["choices"][0]
            assert step["tokens"]["prompt_ids"] == sent["prompt_token_ids"]
            assert step["tokens"]["completion_ids"] == choice["token_ids"]
            assert step["tokens"]["completion_logprobs"] == pytest.approx(
                [entry["logprob"] for entry in choice["logprobs"]["content"]]
            )
            assert step["completion"] == [choice["message"]]
    prompts = [len(step["prompt"]) for step in results.state[0]["trajectory"]]
    assert prompts == [1, 3, 5, 7]


def test_a_run_that_did_less_is_refused(bench: Any) -> None:
    results = asyncio.run(bench.run_rolltree(2, 3, bench.ScriptedTransport(3)))
    with pytest.raises(SystemExit, match="3 steps"):
        bench.check_results(results, 2, 4)


def test_what_32_turns_keep(bench: Any) -> None:
    """verifiers 0.1.8 keeps 14.9 MB (measured); a hundredth of it are 149 kB."""
    found = bench.side("rolltree", 6, 32, memory=True)
    payload = 4 * (500 + 31 * 500 + 100) + 4 * 32 * 100
    assert payload < found["kept_bytes"] < 149_000


def test_each_bar_can_be_missed(bench: Any) -> None:
    good = {"cpu_ratio": 9.0, "memory_ratio_4": 20.0, "memory_ratio_32": 107.0, "import_s": 0.1}
    bad = {"cpu_ratio": 7.9, "memory_ratio_4": 14.0, "memory_ratio_32": 99.0, "import_s": 0.4}
    assert [bar.met for bar in bench.bars(good)] == [True] * 4
    for at, (name, value) in enumerate(bad.items()):
        found = [bar.met for bar in bench.bars(good | {name: value})]
        assert found == [index != at for index in range(4)]
