"""Recorded rollouts played again: equal, or the first difference with both sides."""

import asyncio

import pytest

import rolltree as rt
from rolltree.inference import ChatRenderer
from rolltree.records import replay, replay_async, replay_many
from rolltree.rollouts.decode import decode_results
from rolltree.testing import SPECIAL_TOKENS, ByteTokenizer, ScriptedClient, ScriptedServer


class Guess(rt.MultiTurnEnv):
    """Guess a number; every wrong guess is told which way to go."""

    hint = "The number is {way} than {given}."

    async def env_response(self, messages, state):
        given, wanted = messages[-1]["content"], state["answer"]
        way = "larger" if int(given) < int(wanted) else "smaller"
        return [{"role": "user", "content": self.hint.format(way=way, given=given)}]

    @rt.stop
    async def found(self, state):
        steps = state["trajectory"]
        return bool(steps) and steps[-1]["completion"][-1]["content"] == state["answer"]


@rt.run_inline
def right(completion, answer):
    return float(completion[-1]["content"] == answer)


ROWS = [{"question": f"guess {index}", "answer": str(index + 3)} for index in range(4)]


def a_game(kind=Guess, rubric=None, **settings):
    rubric = rubric or rt.Rubric([right])
    return kind(dataset=ROWS, rubric=rubric, env_id="guess", **{"max_turns": 4, **settings})


def by_turn(messages):
    return {1: "1", 3: "9", 5: "4"}.get(len(messages), "0")


def record(folder, env, client, **settings):
    with rt.Run.open_or_create(folder, config={"env": env.env_id}, kind="eval") as run:
        return rt.evaluate(env, client, run=run, **settings)


@pytest.fixture
def run(tmp_path):
    record(tmp_path / "run", a_game(), ScriptedClient(["1", "9", "4"]))
    return tmp_path / "run"


def test_the_same_environment_replays_equal(run):
    reports = replay_many(run, a_game())
    assert [report.difference for report in reports] == [None] * 4
    by_id = {report.request_id: report for report in reports}
    report = by_id["eval/guess/1/0"]
    assert (report.num_calls, report.num_replayed, report.num_continued) == (3, 3, 0)
    assert report.is_equal
    assert report.live.states[0]["reward"] == 1.0


def test_the_exact_tokens_are_in_the_live_rollout(run):
    report = replay(run, "eval/guess/1/0", a_game())
    for recorded, live in zip(
        *(each.states[0]["trajectory"] for each in (report.recorded, report.live)), strict=True
    ):
        assert dict(live["tokens"]) == dict(recorded["tokens"])


def test_the_first_thing_that_is_said_differently_is_shown_with_both_sides(run):
    class Changed(Guess):
        hint = "Go {way} than {given}!"

    report = replay(run, "eval/guess/1/0", a_game(Changed))
    found = report.difference
    assert (found.kind, found.call, found.where) == ("prompt", 1, "message 2 of the prompt (user)")
    assert found.recorded["content"] == "The number is larger than 1."
    assert found.live["content"] == "Go larger than 1!"
    assert (report.num_replayed, report.is_equal) == (1, False)
    assert report.live.error is not None  # it ended there, and has no reward
    assert report.as_dict()["difference"]["kind"] == "prompt"


def test_what_is_ignored_counts_as_equal(run):
    class Changed(Guess):
        hint = "The number is {way}  than {given}."

    assert not replay(run, "eval/guess/1/0", a_game(Changed)).is_equal
    assert replay(run, "eval/guess/1/0", a_game(Changed), ignore=[r"\s+"]).is_equal
    with pytest.raises(rt.ConfigError, match="not a regular expression"):
        replay(run, "eval/guess/1/0", a_game(Changed), ignore=["("])


@pytest.mark.parametrize(
    ("change", "kind", "where"),
    [
        ({"max_turns": 2}, "missing call", "the model is not asked again"),
        ({"max_turns": 9}, "extra call", "the model is asked once more"),
        (
            {"oai_tools": [{"type": "function", "function": {"name": "f"}}]},
            *("tools", "the tools that the model is offered"),
        ),
    ],
)
def test_other_differences_are_named(tmp_path, change, kind, where):
    record(tmp_path / "run", a_game(), ScriptedClient(["1", "9", "1", "2"]))
    found = replay(tmp_path / "run", "eval/guess/1/0", a_game(**change)).difference
    assert (found.kind, found.where) == (kind, where)


def test_the_row_is_the_recorded_one(run):
    assert replay(run, "eval/guess/1/0", a_game(system_prompt="Another row format.")).is_equal


def test_another_ending_and_another_last_word_are_differences(run):
    class Renamed(Guess):
        found = None

        @rt.stop
        async def solved(self, state):
            steps = state["trajectory"]
            return bool(steps) and steps[-1]["completion"][-1]["content"] == state["answer"]

    found = replay(run, "eval/guess/1/0", a_game(Renamed)).difference
    assert (found.kind, found.where, found.recorded, found.live) == (
        *("ending", "stop_condition"),
        *("found", "solved"),
    )


def test_other_rewards_are_a_difference_unless_they_are_left_out(run):
    @rt.run_inline
    def right(completion, answer):
        return 0.25

    env = a_game(rubric=rt.Rubric([right]))
    found = replay(run, "eval/guess/1/0", env).difference
    assert (found.kind, found.where, found.recorded, found.live) == ("metric", "right", 1.0, 0.25)
    report = replay(run, "eval/guess/1/0", env, score=False)
    assert report.is_equal
    assert report.notes == ("rewards and metrics were not compared",)


def test_until_stops_before_a_call(run):
    report = replay(run, "eval/guess/1/0", a_game(), until=2)
    assert (report.num_replayed, report.difference) == (2, None)
    assert report.stopped == "stopped after 2 calls, as asked"
    assert len(report.live.states[0]["trajectory"]) == 2


def test_recorded_failures_fail_again(tmp_path):
    def answer(messages):
        if len(messages) > 2:
            raise rt.PromptTooLong("too long") if "guess 0" in str(messages) else rt.ModelError("x")
        return "1"

    record(tmp_path / "run", a_game(), ScriptedClient(answer))
    for report in replay_many(tmp_path / "run", a_game()):
        assert report.difference is None
        recorded, live = report.recorded.states[0], report.live.states[0]
        assert live["truncation_reason"] == recorded["truncation_reason"]
        assert (live["error"] and live["error"].type) == (
            recorded["error"] and recorded["error"].type
        )


async def test_a_rollout_that_a_time_limit_cut_is_compared_up_to_there(tmp_path):
    class Slow(Guess):
        limited = True

        async def env_response(self, messages, state):
            if self.limited and len(state["trajectory"]) == 2:
                await asyncio.Event().wait()
            return await super().env_response(messages, state)

    with rt.Run.create(tmp_path / "run") as run:
        await rt.evaluate_async(
            a_game(Slow), ScriptedClient(["1", "9", "8"]), num_examples=1, run=run, deadline_s=0.3
        )

    class Fast(Slow):
        limited = False

    report = await replay_async(tmp_path / "run", "eval/guess/0/0", a_game(Fast))
    assert (report.difference, report.num_replayed) == (None, 2)
    assert report.stopped.startswith("the recording ends here: RolloutTimeout")


def test_completions_of_strings_replay_and_continue(tmp_path):
    def env(**more):
        rows = [{"prompt": "1 + 1 =", "answer": "2", **more}]
        return rt.SingleTurnEnv(dataset=rows, message_type="completion", env_id="text")

    record(tmp_path / "run", env(), ScriptedClient([" 2"]))
    report = replay(tmp_path / "run", "eval/text/0/0", env())
    assert report.is_equal
    assert report.live.states[0]["completion"] == " 2"


def test_rewards_of_a_group_are_compared_with_the_whole_group(tmp_path):
    async def rank(completions):
        return [
            float(sum(c[0]["content"] > o[0]["content"] for o in completions)) for c in completions
        ]

    said = iter("12341234")
    env = a_game(rubric=rt.Rubric([rank]), max_turns=1)
    record(
        tmp_path / "run", env, ScriptedClient(lambda _: next(said)), num_examples=2,
        rollouts_per_example=4,
    )  # fmt: skip
    for report in (*replay_many(tmp_path / "run", env, num=3), *replay_many(tmp_path / "run", env)):
        assert report.difference is None
    assert replay(tmp_path / "run", "eval/guess/1/2", env).live.states[0]["metrics"] == {
        "rank": 2.0
    }


class TestWhatCannotBeReplayed:
    def test_calls_beside_the_conversation(self, tmp_path):
        class Simulated(Guess):
            async def env_response(self, messages, state):
                ask = state["client"].chat.completions.create
                seen = await ask(model="m", messages=[{"role": "user", "content": "play a user"}])
                return [{"role": "user", "content": seen.choices[0].message.content}]

        record(tmp_path / "run", a_game(Simulated), ScriptedClient(["1", "9", "4"]))
        found = replay(tmp_path / "run", "eval/guess/1/0", a_game(Simulated)).difference
        assert (found.kind, found.live["content"]) == ("extra call", "play a user")
        assert "not stored, so they cannot be replayed" in found.where

    def test_no_such_rollout(self, run):
        with pytest.raises(rt.ConfigError, match="Did you mean 'eval/guess/1/0'"):
            replay(run, "eval/guess/1/00", a_game())

    def test_no_environment(self, tmp_path, run):
        with rt.Run.create(tmp_path / "none"):
            pass
        with pytest.raises(rt.ConfigError, match="does not say which environment"):
            replay(tmp_path / "none", "x")

    def test_a_path_that_the_run_names_is_not_followed(self, tmp_path):
        marker = tmp_path / "it-ran"
        (tmp_path / "hostile.py").write_text(f"open({str(marker)!r}, 'w')")
        with rt.Run.create(tmp_path / "run", config={"env": str(tmp_path / "hostile.py")}):
            pass
        with pytest.raises(rt.ConfigError, match="a path is not followed"):
            replay(tmp_path / "run", "x")
        assert not marker.exists()

    def test_a_row_with_an_object(self, tmp_path):
        rows = [{"question": "q", "answer": "1", "info": {"made": object()}}]
        env = Guess(dataset=rows, env_id="guess", max_turns=1)
        record(tmp_path / "run", env, ScriptedClient(["1"]))
        with pytest.raises(rt.ConfigError, match=r"held a builtins\.object"):
            replay(tmp_path / "run", "eval/guess/0/0", env)

    def test_unknown_options(self, run):
        with pytest.raises(rt.ConfigError, match="Did you mean 'ignore'"):
            replay(run, "eval/guess/1/0", a_game(), ignor=["x"])


class TestBranches:
    """A model goes on where the recorded part ends."""

    def branch(self, run, client, into, **options):
        with rt.Run.open_or_create(into, config={}, kind="replay") as target:
            report = replay(run, "eval/guess/1/0", a_game(), client=client, into=target, **options)
            return report, list(decode_results(target.rollouts()))

    def test_branches_continue_the_same_tree_token_for_token(self, run, tmp_path):
        client = ScriptedClient(["4"])
        report, stored = self.branch(run, client, tmp_path / "to", until=2, num_branches=3)
        assert (report.num_replayed, report.num_continued, report.difference) == (2, 1, None)
        assert sorted(r.request.request_id for r in stored) == [
            f"eval/guess/1/0@2/{index}" for index in range(3)
        ]
        assert len({r.request.sampling_seed for r in stored}) == 3
        recorded = report.recorded.states[0]["trajectory"]
        for result in stored:
            steps = result.states[0]["trajectory"]
            assert [s["completion"][0]["content"] for s in steps] == ["1", "9", "4"]
            for mine, theirs in zip(steps[:2], recorded[:2], strict=True):
                assert dict(mine["tokens"]) == dict(theirs["tokens"])
            before = [*steps[1]["tokens"]["prompt_ids"], *steps[1]["tokens"]["completion_ids"]]
            assert steps[2]["tokens"]["prompt_ids"][: len(before)] == before
            assert result.states[0]["reward"] == 1.0

    def test_it_goes_on_at_the_first_difference(self, run, tmp_path):
        class Changed(Guess):
            hint = "Go {way}!"

        report = replay(run, "eval/guess/1/0", a_game(Changed), client=ScriptedClient(["4"]))
        assert (report.num_replayed, report.num_continued) == (1, 1)
        assert report.difference.kind == "prompt"
        assert report.live.states[0]["reward"] == 1.0

    def test_the_same_branches_are_not_played_twice(self, run, tmp_path):
        client = ScriptedClient(["4"])
        self.branch(run, client, tmp_path / "to", until=2)
        _, stored = self.branch(run, client, tmp_path / "to", until=2, num_branches=2)
        assert len(stored) == 2
        with pytest.raises(rt.ConfigError, match="all 2 branches are in"):
            self.branch(run, client, tmp_path / "to", until=2, num_branches=2)

    def test_another_tokenizer_gets_the_words_and_no_foreign_ids(self, run):
        order = tuple(reversed(SPECIAL_TOKENS))  # other ids for the same words
        renderer = ChatRenderer(ByteTokenizer(special_tokens=order))
        client = ScriptedClient(["4"], renderer=renderer)
        report = replay(run, "eval/guess/1/0", a_game(), client=client, until=2)
        steps = report.live.states[0]["trajectory"]
        assert [step["tokens"] is None for step in steps] == [True, True, False]

    @pytest.mark.parametrize("name", ["server-model", "another-model"])
    async def test_behind_a_server_ids_are_kept_where_the_model_has_the_name(self, tmp_path, name):
        with ScriptedServer(by_turn, model="server-model") as server:
            client = rt.OpenAIClient(server.base_url, "server-model")
            with rt.Run.create(tmp_path / "run") as run:
                await rt.evaluate_async(a_game(), client, num_examples=2, run=run)
            await client.aclose()
        with ScriptedServer(by_turn, model=name) as server:
            client = rt.OpenAIClient(server.base_url, name)
            report = await replay_async(
                tmp_path / "run", "eval/guess/1/0", a_game(), client=client, until=2
            )
            await client.aclose()
        steps = report.live.states[0]["trajectory"]
        is_same = name == "server-model"
        assert [step["tokens"] is not None for step in steps] == [is_same, is_same, True]
        if is_same:
            before = [*steps[1]["tokens"]["prompt_ids"], *steps[1]["tokens"]["completion_ids"]]
            assert steps[2]["tokens"]["prompt_ids"][: len(before)] == before
            assert steps[2]["response"].extends is not None

    def test_branches_need_a_model(self, run):
        with pytest.raises(rt.ConfigError, match="no client was given"):
            replay(run, "eval/guess/1/0", a_game(), num_branches=2)
