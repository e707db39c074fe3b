"""`evaluate` over the real engine and store: resuming, failures, groups, files."""

import asyncio
import json

import pytest

from rolltree.evaluation import compare_reports, evaluate_async, write_results
from rolltree.rollouts import RolloutSource
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run
from rolltree.tokens import Trajectory
from rolltree.values.errors import ConfigError, record_error
from rolltree.values.types import FinishReason, ModelResponse, State


class EchoClient:
    """A model that repeats the last message; raises when told to."""

    model = "echo"

    def session(self):
        return self

    async def chat(self, messages, *, tools=None, sampling=None, model=None, message_type="chat"):
        text = messages[-1]["content"]
        if text == "hang up":
            raise ConnectionError("the server hung up")
        return ModelResponse(
            message={"role": "assistant", "content": text},
            text=text,
            finish_reason=FinishReason.STOP,
            prompt_ids=None,
            completion_ids=None,
            logprobs=None,
            versions=None,
            temperature=sampling.temperature,
            call_id=0,
            num_prompt_tokens=3,
            num_completion_tokens=2,
        )

    async def generate(self, request):
        raise NotImplementedError

    async def aclose(self):
        pass


class EchoSource:
    """Example i asks for its own number; even examples are answered right."""

    env_id = "echo"

    def __init__(self, questions=("0", "1", "2", "3"), delays=None):
        self.questions = questions
        self.delays = delays or {}
        self.played = []

    def num_examples(self, split):
        return len(self.questions)

    def example(self, split, index):
        prompt = [{"role": "user", "content": self.questions[index]}]
        return {"prompt": prompt, "example_id": index, "task": "even" if index % 2 == 0 else "odd"}

    async def run_request(self, request, client):
        index = request.input["example_id"]
        self.played.append(request.request_id)
        state = State(
            input=dict(request.input), trajectory=Trajectory(), error=None, reward=None,
            metrics=None, completion=None, is_completed=True, timing=None,
        )  # fmt: skip
        await asyncio.sleep(self.delays.get(index, 0))
        try:
            response = await client.chat(request.input["prompt"], sampling=request.sampling)
        except ConnectionError as error:
            state["error"] = record_error(error, "model")
            return [state]
        state["trajectory"].append_call(
            prompt=request.input["prompt"], completion=[response.message], response=response
        )
        state["completion"] = [response.message]
        state["reward"] = float(index % 2 == 0)
        state["metrics"] = {"length": len(response.text)}
        return [state]


class GroupSource(EchoSource):
    """Rewards compare the members of a group: the share of members that it knows of."""

    has_group_rewards = True

    async def score_group(self, states):
        for state in states:
            state["reward"] = float(len(states))


def test_the_source_is_one():
    assert isinstance(EchoSource(), RolloutSource)


async def test_report_of_a_small_evaluation(tmp_path):
    with Run.create(tmp_path) as run:
        report = await evaluate_async(
            EchoSource(), EchoClient(), rollouts_per_example=2, run=run, sampling={"max_tokens": 4}
        )
        assert run.num_rollouts(phase="eval") == 8
        (result, *_) = decode_results(run.rollouts())
    assert report.reward.mean == 0.5
    assert (report.num_examples, report.num_rollouts, report.num_resumed) == (4, 8, 0)
    assert {name: task.mean for name, task in report.tasks.items()} == {"even": 1.0, "odd": 0.0}
    assert report.pass_at[2].mean == 0.5
    assert report.metrics["length"].mean == 1.0
    assert report.results["usage"]["num_completion_tokens"] == 16
    assert (report.model, report.env_id) == ("echo", "echo")
    assert result.request.sampling.max_tokens == 4


async def test_a_fraction_of_the_examples_without_a_run():
    report = await evaluate_async(EchoSource(), EchoClient(), num_examples=3)
    assert [outcome.example[2] for outcome in report.outcomes] == [0, 1, 2]
    assert report.run_path is None


async def test_failures_are_counted_and_stored(tmp_path):
    source = EchoSource(("0", "hang up", "2"))
    with Run.create(tmp_path) as run:
        report = await evaluate_async(source, EchoClient(), run=run)
        (failed,) = run.rollouts(status="error")
    assert report.num_failed == 1
    assert report.reward.mean == 1.0
    assert report.results["failures"] == {"ConnectionError": 1}
    assert failed.reward is None
    assert "Traceback" in failed.errors[0]["traceback"]


async def test_progress_and_results_are_told(tmp_path):
    seen, results = [], []
    with Run.create(tmp_path) as run:
        await evaluate_async(EchoSource(), EchoClient(), num_examples=2, run=run)
        await evaluate_async(
            EchoSource(), EchoClient(), run=run, on_progress=seen.append, on_result=results.append
        )
    assert [progress.num_done for progress in seen] == [2, 3, 4]
    assert seen[0].num_resumed == 2
    assert seen[-1].num_total == 4
    assert seen[-1].mean_reward == 0.5
    assert len(results) == 2


class TestResume:
    async def test_stopped_in_the_middle_only_the_rest_runs(self, tmp_path):
        slow = EchoSource(delays={2: 30, 3: 30})
        with Run.create(tmp_path) as run:
            two = asyncio.Event()
            task = asyncio.create_task(
                evaluate_async(
                    slow, EchoClient(), run=run, on_progress=lambda p: p.num_done == 2 and two.set()
                )
            )
            await two.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        source = EchoSource()
        with Run.open(tmp_path) as run:
            report = await evaluate_async(source, EchoClient(), run=run)
            assert run.num_rollouts() == 4
        assert source.played == ["eval/echo/2/0", "eval/echo/3/0"]
        assert (report.num_rollouts, report.num_resumed) == (4, 2)
        assert [outcome.example[2] for outcome in report.outcomes] == [0, 1, 2, 3]

    async def test_finished_means_nothing_runs(self, tmp_path):
        with Run.create(tmp_path) as run:
            first = await evaluate_async(EchoSource(), EchoClient(), run=run)
            source = EchoSource()
            again = await evaluate_async(source, EchoClient(), run=run)
        assert source.played == []
        assert again.outcomes == first.outcomes

    async def test_more_examples_add_to_what_is_there(self, tmp_path):
        with Run.create(tmp_path) as run:
            await evaluate_async(EchoSource(), EchoClient(), num_examples=3, run=run)
            report = await evaluate_async(EchoSource(), EchoClient(), num_examples=2, run=run)
            assert report.num_rollouts == 2  # the report is about what was asked
            report = await evaluate_async(EchoSource(), EchoClient(), run=run)
            assert report.num_rollouts == 4

    async def test_failed_ones_run_again_only_when_asked(self, tmp_path):
        with Run.create(tmp_path) as run:
            await evaluate_async(EchoSource(("0", "hang up")), EchoClient(), run=run)
            source = EchoSource(("0", "1"))
            same = await evaluate_async(source, EchoClient(), run=run)
            assert (source.played, same.num_failed) == ([], 1)
            again = await evaluate_async(source, EchoClient(), run=run, retry_failed=True)
            assert source.played == ["eval/echo/1/0"]
            assert again.num_failed == 0
            assert run.events("retried")[0].data["failed"][0]["type"] == "ConnectionError"

    @pytest.mark.parametrize(
        ("changed", "named"),
        [
            ({"seed": 1}, "seed = 0"),
            ({"sampling": {"temperature": 0.5}}, "temperature = 1.0"),
            ({"split": "train"}, "split = 'eval'"),
        ],
    )
    async def test_other_settings_are_refused(self, tmp_path, changed, named):
        with Run.create(tmp_path) as run:
            await evaluate_async(EchoSource(), EchoClient(), num_examples=1, run=run)
            with pytest.raises(ConfigError, match=named):
                await evaluate_async(EchoSource(), EchoClient(), run=run, **changed)
            await evaluate_async(EchoSource(), EchoClient(), run=run, phase="other", **changed)

    async def test_settings_that_hold_secrets_are_stored_without(self, tmp_path):
        sampling = {"extra_headers": {"Authorization": "Bearer abcdefgh12345678"}}
        with Run.create(tmp_path) as run:
            await evaluate_async(EchoSource(), EchoClient(), run=run, sampling=sampling)
            await evaluate_async(EchoSource(), EchoClient(), run=run, sampling=sampling)
        for file in tmp_path.iterdir():
            assert b"abcdefgh12345678" not in file.read_bytes()


class TestGroups:
    async def test_a_group_is_stored_whole(self, tmp_path):
        """Stopped while members wait for their group: nothing of it is stored, all of it runs."""
        with Run.create(tmp_path) as run:
            three = asyncio.Event()
            task = asyncio.create_task(
                evaluate_async(
                    GroupSource(delays={1: 30}), EchoClient(), num_examples=2, run=run,
                    rollouts_per_example=3,
                    on_progress=lambda p: p.num_done == 3 and three.set(),
                )
            )  # fmt: skip
            await three.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert run.num_rollouts() == 3
            source = GroupSource()
            report = await evaluate_async(
                source, EchoClient(), num_examples=2, rollouts_per_example=3, run=run
            )
        assert len(source.played) == 3
        assert report.reward.mean == 3.0  # every member was compared with all three

    async def test_another_group_size_is_another_evaluation(self, tmp_path):
        with Run.create(tmp_path) as run:
            await evaluate_async(GroupSource(), EchoClient(), rollouts_per_example=2, run=run)
            with pytest.raises(ConfigError, match="group_size = 2"):
                await evaluate_async(GroupSource(), EchoClient(), rollouts_per_example=3, run=run)
            await evaluate_async(
                EchoSource(), EchoClient(), rollouts_per_example=2, run=run, phase="b"
            )
            await evaluate_async(
                EchoSource(), EchoClient(), rollouts_per_example=3, run=run, phase="b"
            )


async def test_before_and_after(tmp_path):
    class Better(EchoSource):
        async def run_request(self, request, client):
            (state,) = await super().run_request(request, client)
            state["reward"] = 1.0
            return [state]

    with Run.create(tmp_path) as run:
        before = await evaluate_async(EchoSource(), EchoClient(), run=run, phase="before")
        after = await evaluate_async(Better(), EchoClient(), run=run, phase="after")
    found = compare_reports(before, after)
    assert found.difference.mean == 0.5
    assert found.difference.num_examples == 4


async def test_verifiers_files(tmp_path):
    source = EchoSource(("0", "hang up"))
    with Run.create(tmp_path / "run") as run:
        report = await evaluate_async(source, EchoClient(), run=run)
        folder = write_results(
            tmp_path / "out",
            decode_results(run.rollouts(phase="eval")),
            report,
            env_args={"level": 2, "api_key": "hunter2"},
            base_url="http://user:secret@host/v1",
            sampling_args={"max_tokens": 4},
        )
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    good, bad = sorted(lines, key=lambda line: line["example_id"])
    assert good["prompt"] == [{"role": "user", "content": "0"}]
    assert good["completion"] == [{"role": "assistant", "content": "0"}]
    assert (good["reward"], good["task"], good["length"]) == (1.0, "even", 1)
    assert {"generation_ms", "scoring_ms", "total_ms"} <= good.keys()
    assert (bad["reward"], bad["error"]["type"]) == (None, "ConnectionError")
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["avg_reward"] == 1.0
    assert metadata["avg_metrics"] == {"length": 1.0}
    assert metadata["env_args"] == {"level": 2, "api_key": "[redacted]"}
    assert "secret" not in metadata["base_url"]
    assert (metadata["env_id"], metadata["model"], metadata["num_failed"]) == ("echo", "echo", 1)


async def test_nonsense_is_refused():
    with pytest.raises(ConfigError, match="rollouts_per_example is 0"):
        await evaluate_async(EchoSource(), EchoClient(), rollouts_per_example=0)
    with pytest.raises(ConfigError, match="nothing to run"):
        await evaluate_async(EchoSource(), EchoClient(), num_examples=0)


async def test_a_run_is_an_open_one_and_not_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="not an open run"):
        await evaluate_async(EchoSource(), EchoClient(), run=tmp_path)
