"""Evaluation through the embedded engine: real sampling, exact tokens in the store."""

import numpy as np
import pytest

import rolltree as rt
from rolltree.evaluation import compare_reports, evaluate_async
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run

MAX_TOKENS = 8


class TwoTurns(rt.MultiTurnEnv):
    """Asks, says "again", asks: the second prompt continues the first call's tokens."""

    def __init__(self):
        rows = [{"question": f"Say {i}.", "answer": str(i)} for i in range(3)]
        rubric = rt.Rubric([lambda completion, answer: float(answer in completion[0]["content"])])
        super().__init__(eval_dataset=rows, rubric=rubric, max_turns=2, env_id="two_turns")

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "again"}]


@pytest.fixture(scope="module")
def tiny():
    local = pytest.importorskip("rolltree.inference.local")
    from rolltree.inference.models import load_model

    model, tokenizer = load_model("tiny")
    return lambda: local.local_client(model, tokenizer, name="tiny", max_batch=8, max_context=256)


async def run_it(client, run, **options):
    try:
        return await evaluate_async(
            TwoTurns(), client, run=run, sampling={"max_tokens": MAX_TOKENS}, **options
        )
    finally:
        await client.aclose()


async def test_every_call_has_its_exact_tokens(tiny, tmp_path):
    with Run.create(tmp_path) as run:
        report = await run_it(tiny(), run, rollouts_per_example=2)
        results = list(decode_results(run.rollouts()))
        rows = list(run.rollouts(blobs=False))
    assert (report.num_rollouts, report.num_failed) == (6, 0)
    for result in results:
        first, second = (step["tokens"] for step in result.states[0]["trajectory"])
        for tokens in (first, second):
            assert 0 < len(tokens["completion_ids"]) <= MAX_TOKENS
            assert len(tokens["completion_logprobs"]) == len(tokens["completion_ids"])
            assert max(tokens["completion_logprobs"]) <= 0.0
        known = first["prompt_ids"] + first["completion_ids"]
        assert second["prompt_ids"][: len(known)] == known  # token in, token out
    for row in rows:
        assert row.num_calls == 2
        assert row.num_unique_tokens < row.num_prompt_tokens + row.num_completion_tokens
        assert (row.min_version, row.max_version) == (0, 0)


async def test_the_same_seed_samples_the_same_tokens(tiny, tmp_path):
    sampled = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        with Run.create(tmp_path / name) as run:
            await run_it(tiny(), run, seed=seed, rollouts_per_example=2, max_concurrent=3)
            sampled.append(
                {
                    result.request.request_id: [
                        step["tokens"]["completion_ids"] for step in result.states[0]["trajectory"]
                    ]
                    for result in decode_results(run.rollouts())
                }
            )
    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]
    ids = sorted(sampled[0])
    assert sampled[0][ids[0]] != sampled[0][ids[1]]  # members of an example differ


async def test_a_run_that_is_continued_equals_one_that_was_not(tiny, tmp_path):
    with Run.create(tmp_path / "whole") as run:
        whole = await run_it(tiny(), run)
    with Run.create(tmp_path / "parts") as run:
        await run_it(tiny(), run, num_examples=1)
        parts = await run_it(tiny(), run)
    assert parts.num_resumed == 1
    assert [o.reward for o in parts.outcomes] == [o.reward for o in whole.outcomes]
    assert compare_reports(whole, parts).difference.mean == 0.0


@pytest.mark.model
@pytest.mark.slow
async def test_the_real_model_answers(tmp_path):
    """SmolLM2 adds one-digit numbers with a few-shot prompt, sometimes: tokens, text, rewards."""
    local = pytest.importorskip("rolltree.inference.local")
    from rolltree.inference.models import load_model

    shots = []
    for a, b in ((2, 3), (4, 4), (1, 6)):
        shots += [
            {"role": "user", "content": f"{a} + {b} ="},
            {"role": "assistant", "content": str(a + b)},
        ]
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in (3, 5) for b in (1, 2)]
    rubric = rt.Rubric([lambda completion, answer: float(completion[0]["content"] == answer)])
    env = rt.SingleTurnEnv(eval_dataset=rows, few_shot=shots, rubric=rubric, env_id="add")
    model, tokenizer = load_model("smollm2-135m")
    client = local.local_client(model, tokenizer, name="smollm2-135m", max_batch=8, max_context=512)
    with Run.create(tmp_path) as run:
        report = await evaluate_async(
            env, client, run=run, rollouts_per_example=4, sampling={"max_tokens": 4}
        )
        results = list(decode_results(run.rollouts()))
    assert report.num_failed == 0
    for result in results:
        (step,) = result.states[0]["trajectory"]
        ids = step["tokens"]["completion_ids"]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert text == step["completion"][0]["content"]
        assert np.isfinite(step["tokens"]["completion_logprobs"]).all()
    answers = {result.states[0]["completion"][0]["content"] for result in results}
    assert any(answer.strip().isdigit() for answer in answers)
    await client.aclose()
