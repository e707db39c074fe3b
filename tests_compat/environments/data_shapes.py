"""Environments whose data have every shape that was allowed."""

import json

import verifiers as vf
from datasets import Dataset


def length(completion):
    return float(len(completion))


def make(rows, eval_rows=None, **kwargs):
    rubric = vf.Rubric(funcs=[length])
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows) if rows else None,
        eval_dataset=Dataset.from_list(eval_rows) if eval_rows else None,
        rubric=rubric,
        **kwargs,
    )


def prompts():
    return make([{"prompt": [{"role": "user", "content": f"Say {n}"}]} for n in range(4)])


def prompts_with_system():
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": f"Say {n}"},
                {"role": "assistant", "content": "mm"},
                {"role": "user", "content": "more"},
            ],
            "answer": str(n),
            "task": "own" if n % 2 else "other",
            "example_id": 10 - n,
        }
        for n in range(4)
    ]
    return make(rows, system_prompt="ignored", few_shot=[{"role": "user", "content": "ignored"}])


def few_shot():
    shots = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    return make(
        [{"question": f"q{n}", "answer": f"a{n}", "level": n} for n in range(4)],
        [{"question": f"e{n}", "answer": f"b{n}"} for n in range(3)],
        system_prompt="Short.",
        few_shot=shots,
        env_id="own-id",
        env_args={"a": 1},
        sampling_args={"temperature": 0.3, "extra_body": {"top_k": 5}, "max_tokens": 30},
        max_workers=7,
        something="else",
        number=3,
    )


def text_ids():
    return make([{"question": f"q{n}", "answer": "a", "example_id": f"id-{n}"} for n in range(3)])


def no_answer():
    return make([{"question": f"q{n}"} for n in range(3)])


def infos():
    return make([{"question": f"q{n}", "info": {"n": n, "s": [str(n)]}} for n in range(3)])


def json_infos():
    return make([{"question": f"q{n}", "info": json.dumps({"n": n})} for n in range(3)])


def eval_only():
    return make(None, [{"question": f"q{n}", "answer": "a"} for n in range(3)])


def nothing():
    return make(None)


def numbers():
    return make([{"question": f"q{n}", "answer": n, "extra": [n, None]} for n in range(3)])


def pictures():
    rows = [
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": f"What is {n}?"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                    ],
                }
            ],
            "answer": "x",
        }
        for n in range(3)
    ]
    return make(rows)


def audio():
    rows = [
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Listen."},
                        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
                    ],
                }
            ],
            "answer": "x",
        }
    ]
    return make(rows)


def completion():
    rows = [{"prompt": f"Once {n}", "example_id": n, "task": "t", "answer": "x"} for n in range(3)]
    return make(rows, message_type="completion")


def completion_with_system():
    return make([{"prompt": "x"}], message_type="completion", system_prompt="no")


def wrong_rubric():
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"question": "q", "answer": "a"}]),
        rubric=vf.Rubric(funcs=[length], weights=[1.0, 2.0]),
    )


def mapped():
    return make(
        [{"question": f"q{n}", "answer": "a"} for n in range(3)], map_kwargs={"num_proc": 1}
    )


def no_question():
    return make([{"text": "x"}])


class OwnFormat(vf.SingleTurnEnv):
    """Formats its rows itself."""

    def format_dataset(self, dataset, system_prompt=None, few_shot=None, *args, **kwargs):
        dataset = dataset.map(lambda row: {"question": row["question"].upper()})
        return super().format_dataset(dataset, system_prompt, few_shot, *args, **kwargs)


def own_format():
    rows = [{"question": f"q{n}", "answer": "a"} for n in range(3)]
    return OwnFormat(
        dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[length]), system_prompt="s"
    )


def load_environment(kind, **kwargs):
    return globals()[kind](**kwargs)
