"""Environments whose rubrics do everything that reward functions may do."""

import functools
import os

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI, OpenAI


def rows(num=6):
    return Dataset.from_list(
        [
            {
                "question": f"What is {n} plus {n + 3}?",
                "answer": str(2 * n + 3),
                "info": {"n": n, "tag": "x" * (n % 3)},
            }
            for n in range(num)
        ]
    )


def single(rubric, **kwargs):
    return vf.SingleTurnEnv(dataset=rows(), rubric=rubric, **kwargs)


def raising(completion, answer, **kwargs):
    raise KeyError("reward failed")


def none(completion):
    return None


def boolean(completion, answer):
    return answer in completion[-1]["content"]


def integer(state):
    return 3


def text(state):
    return "0.5"


def word(state):
    return "no number"


def many(prompt, completion, answer, state, task, info, parser, **kwargs):
    state["kwargs"] = sorted(kwargs)
    return len(prompt) + info["n"] / 10 + len(task) / 100


def defaults(completion, scale=2.0, answer="none"):
    return scale * float(answer in completion[-1]["content"])


def unknown(completion, tokenizer):
    return 1.0


def noted(func):
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        return func(*args, **kwargs)

    return wrapper


def anoted(func):
    @functools.wraps(func)
    async def wrapper(**kwargs):
        return await func(**kwargs)

    return wrapper


@noted
def wrapped(completion, info):
    return info["n"]


@anoted
async def async_wrapped(completion, info, state):
    return info["n"] / 2


class Scorer:
    def __init__(self, scale):
        self.scale = scale

    def method(self, completion, info):
        return self.scale * info["n"]

    @staticmethod
    def static(info):
        return info["n"]

    @classmethod
    def of_class(cls, info):
        return float(len(cls.__name__))


def kinds():
    scorer = Scorer(2)
    rubric = vf.Rubric(
        funcs=[raising, none, boolean, integer, text, word, many, defaults, unknown, wrapped],
        weights=[1.0, 1.0, 1.0, 0.0, -1.0, 1.0, 0.5, 1.0, 1.0, 1],
    )
    rubric.add_reward_func(async_wrapped, weight=0.25)
    rubric.add_reward_func(scorer.method)
    rubric.add_reward_func(scorer.static, weight=0)
    rubric.add_reward_func(Scorer.of_class)
    rubric.add_reward_func(lambda completion: 0.125)
    return single(rubric)


def partial():
    func = functools.partial(many_of, scale=3.0)
    functools.update_wrapper(func, many_of)
    return single(vf.Rubric(funcs=[func]))


def many_of(completion, info, scale):
    return scale * info["n"]


def nameless():
    return single(vf.Rubric(funcs=[functools.partial(many_of, scale=3.0)]))


def appended():
    rubric = vf.Rubric(funcs=[boolean])
    rubric.funcs.append(integer)
    rubric.weights.append(0.5)
    rubric.funcs.insert(0, text)
    rubric.weights.insert(0, 2.0)
    return single(rubric)


def same_names():
    def score(completion):
        return 1.0

    first = score

    def score(completion):
        return 2.0

    return single(vf.Rubric(funcs=[first, score], weights=[1.0, 10.0]))


def in_order():
    """Functions that leave notes for the next."""

    async def first(state):
        state["note"] = 5.0
        return 0.0

    def second(state):
        return state["note"]

    async def third(state):
        return state["note"] * 2

    return single(vf.Rubric(funcs=[first, second, third]))


def relative(states, completions, answers, prompts, tasks, infos):
    lengths = [len(completion[-1]["content"]) for completion in completions]
    longest = max(lengths) or 1
    return [length / longest for length in lengths]


async def async_relative(states, **kwargs):
    return [float(len(states))] * len(states)


def bad_relative(states):
    raise RuntimeError("no")


def groups():
    return single(
        vf.Rubric(
            funcs=[boolean, relative, async_relative, bad_relative], weights=[1.0, 0.5, 0.1, 1.0]
        )
    )


def rubric_group(client="async"):
    def boolean_too(completion, answer):
        return answer in completion[-1]["content"]

    boolean_too.__name__ = "boolean"
    first = vf.Rubric(funcs=[boolean, integer], weights=[1.0, 0.0])
    second = vf.Rubric(funcs=[boolean_too, relative], weights=[0.5, 1.0])
    group = vf.RubricGroup(rubrics=[first, second, vf.MathRubric()])
    group.add_reward_func(text, weight=0.1)
    return single(group)


class Bonus(vf.Rubric):
    """Scores as usual, and adds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_reward_func(self.own)
        self.class_objects["bonus"] = 0.25

    def own(self, completion, bonus, **kwargs):
        return bonus

    async def score_rollout(self, state, score_sem):
        await super().score_rollout(state, score_sem)
        state["reward"] += 100.0

    async def score_group(self, states, score_sem):
        await super().score_group(states, score_sem)
        for state in states:
            state["reward"] += 10.0
            state["metrics"]["extra"] = 1.0


def bonus():
    return single(Bonus(funcs=[boolean]))


def no_funcs():
    return single(vf.Rubric())


def default_rubric():
    return vf.SingleTurnEnv(dataset=rows())


def math():
    return single(vf.MathRubric(funcs=[boolean], weights=[0.5]))


def replaced():
    env = single(vf.Rubric(funcs=[boolean]))
    env.rubric = vf.RubricGroup(rubrics=[env.rubric, vf.Rubric(funcs=[integer])])
    return env


def client_of(kind):
    url, key = os.environ["OPENAI_BASE_URL"], "EMPTY"
    return (
        OpenAI(base_url=url, api_key=key)
        if kind == "sync"
        else AsyncOpenAI(base_url=url, api_key=key)
    )


async def agrees(judge, prompt, completion, answer, state):
    reply = await judge(prompt, completion, answer, state)
    return float("yes" in reply.lower())


async def agrees_again(judge, prompt, completion, answer, state):
    reply = await judge(prompt, completion, answer, state)
    state["num_judged"] = len(state["judge_response"])
    return float("yes" in reply.lower())


def judged(client="async", prompt=None, sampling=None, parser=None):
    settings = {"judge_prompt": prompt} if prompt else {}
    rubric = vf.JudgeRubric(
        judge_client=client_of(client),
        judge_model="judge",
        judge_sampling_args=sampling,
        parser=vf.XMLParser(["answer"]) if parser else None,
        **settings,
    )
    rubric.add_reward_func(agrees)
    rubric.add_reward_func(agrees_again, weight=0.5)
    return single(rubric)


def judged_by_default():
    rubric = vf.JudgeRubric(judge_model="gpt-x")
    rubric.add_reward_func(agrees)
    return single(rubric)


def judge_replaced():
    rubric = vf.JudgeRubric(judge_client=client_of("async"), judge_model="nobody")
    rubric.judge_client = client_of("sync")
    rubric.judge_model = "judge"
    rubric.judge_prompt = "Own {question} {answer} {response}: yes or no?"
    rubric.add_reward_func(agrees)
    return single(rubric)


class OwnJudge(vf.JudgeRubric):
    """A prompt with a field of its own, filled by an own judge method."""

    async def judge(self, prompt, completion, answer, state, **kwargs):
        asked = self.judge_prompt.format(
            question=prompt[-1]["content"], tag=state["info"]["tag"], answer=answer
        )
        reply = await self.judge_client.chat.completions.create(
            model=self.judge_model, messages=[{"role": "user", "content": asked}]
        )
        return reply.choices[0].message.content


def judge_own(fields=True):
    rubric = OwnJudge(
        judge_client=client_of("async"),
        judge_model="judge",
        judge_prompt="{question} with {tag} and {answer}: yes or no?",
    )
    rubric.class_objects["judge"] = rubric.judge
    rubric.add_reward_func(agrees)
    return single(rubric)


def judge_bad_prompt():
    return judged(prompt="{question} {nothing}")


def judge_uses(judge_client, judge_model, judge_prompt, judge_sampling_args, prompt):
    return float(len(judge_model) + len(judge_sampling_args))


def judge_objects():
    rubric = vf.JudgeRubric(
        judge_client=client_of("async"), judge_model="judge", judge_sampling_args={"top_p": 0.5}
    )
    rubric.add_reward_func(judge_uses)
    return single(rubric)


def judge_fails():
    rubric = vf.JudgeRubric(
        judge_client=AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0),
        judge_model="judge",
    )
    rubric.add_reward_func(agrees)
    return single(rubric)


def parsers(kind_of="xml"):
    parser = {
        "xml": lambda: vf.XMLParser(["think", ("answer", "final")], answer_field="answer"),
        "think": lambda: vf.ThinkParser(extract_fn=vf.extract_boxed_answer),
        "maybe": lambda: vf.MaybeThinkParser(extract_fn=vf.extract_boxed_answer),
        "plain": lambda: vf.Parser(extract_fn=str.upper),
    }[kind_of]()

    def right(parser, completion, answer):
        return float(parser.parse_answer(completion) == answer)

    rubric = vf.Rubric(funcs=[right, parser.get_format_reward_func()], parser=parser)
    return single(rubric, parser=parser, system_prompt="Answer in tags.")


def load_environment(kind, **kwargs):
    return globals()[kind](**kwargs)
