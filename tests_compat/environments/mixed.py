"""Groups of environments."""

import verifiers as vf
from datasets import Dataset


def plus(a: int) -> int:
    """Add one."""
    return a + 1


def right(completion, answer):
    return float(answer in completion[-1]["content"])


def used(completion):
    return float(sum(message["role"] == "tool" for message in completion))


def relative(completions):
    return [len(completion[-1]["content"]) / 10 for completion in completions]


def single(num=3, func=right, start=0, **kwargs):
    rows = [
        {"question": f"What is {n} plus {n + 3}?", "answer": str(2 * n + 3)}
        for n in range(start, start + num)
    ]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[func]), **kwargs
    )


def tools():
    rows = [{"question": f"Tool {n}", "answer": "x", "task": "mine"} for n in range(3)]
    return vf.ToolEnv(
        tools=[plus],
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]),
        rubric=vf.Rubric(funcs=[used, right], weights=[0.5, 1.0]),
        max_turns=3,
    )


def pair(**kwargs):
    return vf.EnvGroup([single(system_prompt="Be brief."), tools()], **kwargs)


def named():
    return pair(env_names=["sums", "tools"])


def nested():
    inner = pair(env_names=["sums", "tools"])
    return vf.EnvGroup([inner, single(func=relative, start=10)], env_names=["inner", "outer"])


def wrong_names():
    return pair(env_names=["one"])


def none():
    return vf.EnvGroup([])


def only_eval():
    rows = Dataset.from_list([{"question": "q", "answer": "a"}])
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric(funcs=[right]))
    return vf.EnvGroup([single(), env])


class Router(vf.EnvGroup):
    """Chooses by itself."""

    def get_env_for_task(self, task):
        return self.envs[-1]


def routed():
    return Router([single(), single(num=2, func=relative, start=10)], env_names=["a", "b"])


def load_environment(kind, **kwargs):
    return globals()[kind](**kwargs)
