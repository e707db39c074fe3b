"""`check_environment` finds planted faults, each by its name, and nothing in sound environments."""

import itertools
import random

import pytest

import rolltree as rt
from rolltree.environments.check import CHECKS, check_environment_async
from rolltree.values.errors import ConfigError

WORDS = ["river", "stone", "cloud", "tiger", "lemon", "paper", "amber", "ocean", "maple", "candle"]
TAGS = rt.XMLParser(["answer"])


def rows(words=WORDS, hint=""):
    return [
        {"question": f"Which word has the number {number}? {hint.format(word)}", "answer": word}
        for number, word in enumerate(words)
    ]


@rt.run_inline
def exact(parser, completion, answer):
    return float(parser.parse_answer(completion) == answer)


def single(reward=exact, data=None, **settings):
    return rt.SingleTurnEnv(
        dataset=rows() if data is None else data,
        parser=TAGS,
        rubric=rt.Rubric([reward]),
        **settings,
    )


# Ten planted faults and some more: a name, and what makes the environment that has the fault.


def unseeded_rows():
    return single(data=rows(random.sample(WORDS, len(WORDS))))


def same_ids():
    return single(data=[{**row, "example_id": 1} for row in rows()])


def split_overlap():
    return single(eval_dataset=rows()[:3])


def answer_in_the_prompt():
    return single(data=rows(hint="(it is not {})"))


def reward_of_seven():
    def seven(parser, completion, answer):
        return 7.0 * exact(parser, completion, answer)

    return single(seven)


def scoring_needs_an_answer():
    def first_letter(parser, completion, answer):
        return float(parser.parse_answer(completion)[0] == answer[0])

    return single(first_letter)


def careless_reader():
    def seven(parser, completion, answer):
        said = parser.parse_answer(completion) or ""
        return float(said.isdigit() and int(said) == 7)

    return single(seven)


def empty_is_fine():
    def no_wrong_word(parser, completion, answer):
        said = parser.parse_answer(completion) or ""
        return float(said in ("", answer))

    return single(no_wrong_word)


def mostly_yes():
    data = [
        {"question": f"Is {n} less than 9?", "answer": "yes" if n < 9 else "no"} for n in range(12)
    ]
    return single(data=data)


def found_anywhere():
    def mentioned(completion, answer):
        return float(answer in completion[-1]["content"])

    return single(mentioned)


def everybody_wins():
    return single(lambda completion: 0.5)


def world_of_chance():
    class Dice(rt.MultiTurnEnv):
        async def env_response(self, messages, state):
            return [{"role": "user", "content": f"You rolled {random.random()}."}]

    return Dice(dataset=rows(), max_turns=2, rubric=rt.Rubric([exact]), parser=TAGS)


_calls = itertools.count()


def reward_by_counting():
    def counted(parser, completion, answer):
        return exact(parser, completion, answer) / (1 + next(_calls))

    return single(counted)


class Holding(rt.SingleTurnEnv):
    """Something to release per rollout."""

    def __init__(self):
        super().__init__(dataset=rows(), parser=TAGS, rubric=rt.Rubric([exact]))

    @rt.cleanup
    async def release(self, state):
        state["released"] = True


def for_ever():
    class Chat(rt.MultiTurnEnv):
        async def env_response(self, messages, state):
            return [{"role": "user", "content": "Go on."}]

    return Chat(dataset=rows(), parser=TAGS, rubric=rt.Rubric([exact]))


def released_twice():
    class Twice(Holding):
        async def rollout(self, *args, **kwargs):
            state = await super().rollout(*args, **kwargs)
            await self.release(state)
            return state

    return Twice()


def not_released_when_cancelled():
    class Forgetful(Holding):
        async def rollout(self, input, client, model="", sampling_args=None):
            state = await self.init_state(input)
            prompt = await self.get_prompt_messages(state)
            response = await self.get_model_response(client, model, prompt)
            await self.add_model_response(state, prompt, response)
            await self.is_completed(state)
            await self._cleanup(state)
            return state

    return Forgetful()


def release_breaks():
    class Breaking(Holding):
        @rt.cleanup
        async def release(self, state):
            raise OSError("already gone")

    return Breaking()


def failure_becomes_zero():
    class Quiet(rt.SingleTurnEnv):
        async def rollout(self, *args, **kwargs):
            state = await super().rollout(*args, **kwargs)
            state["error"] = None
            return state

    return Quiet(dataset=rows(), parser=TAGS, rubric=rt.Rubric([exact]))


def world_breaks():
    class Fragile(rt.MultiTurnEnv):
        async def env_response(self, messages, state):
            return [{"role": "user", "content": str(1 / len(messages[-1]["content"]))}]

    return Fragile(dataset=rows(), max_turns=2, parser=TAGS, rubric=rt.Rubric([exact]))


PLANTED = {
    "rows-differ": unseeded_rows,
    "duplicate-ids": same_ids,
    "overlap": split_overlap,
    "leak": answer_in_the_prompt,
    "reward-range": reward_of_seven,
    "scoring-fails": scoring_needs_an_answer,
    "rollout-fails": world_breaks,
    "empty-scores": empty_is_fine,
    "constant-scores": mostly_yes,
    "guessing-scores": found_anywhere,
    "constant-reward": everybody_wins,
    "nondeterministic": world_of_chance,
    "never-ends": for_ever,
    "cleanup-count": released_twice,
    "cleanup-raises": release_breaks,
    "failure-hidden": failure_becomes_zero,
}


@pytest.mark.parametrize("name", PLANTED)
async def test_a_planted_fault_is_found(name):
    report = await check_environment_async(PLANTED[name])
    assert name in {finding.check for finding in report.findings}
    assert not report.is_sound
    allowed = await check_environment_async(PLANTED[name], allow=[name])
    assert name not in {finding.check for finding in allowed.findings}


def test_every_check_has_a_planted_fault():
    # test_harbor.py plants that one.
    assert set(PLANTED) == set(CHECKS) - {"oracle-fails"}


@pytest.mark.parametrize(
    ("make", "check", "message"),
    [
        (reward_by_counting, "nondeterministic", "differ in"),
        (not_released_when_cancelled, "cleanup-count", "0 times in a cancelled rollout"),
        (released_twice, "cleanup-count", "release ran 2 times in a rollout"),
        (mostly_yes, "constant-scores", "'<answer>"),
        (scoring_needs_an_answer, "scoring-fails", "TypeError"),
        (careless_reader, "scoring-fails", "a superscript"),
        (careless_reader, "scoring-fails", "a number too long to read"),
        (reward_of_seven, "reward-range", "is 7, outside of 0 to 1"),
    ],
)
async def test_what_is_said(make, check, message):
    report = await check_environment_async(make)
    said = [finding.message for finding in report.findings if finding.check == check]
    assert any(message in text for text in said)


def choice():
    question = "Question {}: A, B, C or D?"
    return single(
        data=[{"question": question.format(n), "answer": "ABCD"[n % 4]} for n in range(16)]
    )


def coin():
    return single(data=[{"question": f"Q{n}", "answer": ["yes", "no"][n % 2]} for n in range(16)])


@pytest.mark.parametrize("make", [single, choice, coin, Holding])
async def test_sound_environments(make):
    report = await check_environment_async(make)
    assert report.findings == ()
    assert report.is_sound
    assert report.mean_rewards["reference"] == 1.0


async def test_a_world_without_answers_and_another_range():
    class Counter(rt.MultiTurnEnv):
        async def env_response(self, messages, state):
            return [{"role": "user", "content": "more"}]

    def minus(state):
        return -float(len(state["trajectory"]))

    def make():
        return Counter(dataset=[{"prompt": "go"}], max_turns=3, rubric=rt.Rubric([minus]))

    report = await check_environment_async(
        make, reward_range=(-10.0, 0.0), allow=["constant-scores"]
    )
    assert {finding.check for finding in report.findings} == {"empty-scores", "guessing-scores"}
    assert "no answers" in report.notes[0]


async def test_an_unknown_check_cannot_be_allowed():
    with pytest.raises(ConfigError, match="Did you mean 'overlap'"):
        await check_environment_async(single, allow=["overlaps"])
