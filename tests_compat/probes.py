"""Probes of what is not an environment: parsers, helpers, rubrics by hand, results, signatures.

Each takes the base URL of its case and returns what the two sides have to agree on.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import logging
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

from canonical import canonical, failure
from play import attempt, outputs, rows, rubric, state_of

TEXTS = (
    "",
    " ",
    "plain",
    "42",
    "\\boxed{1}",
    "a \\boxed{1} b \\boxed{2}",
    "\\boxed{\\frac{1}{2}}",
    "\\boxed{open",
    "\\boxed{a{b}c} tail",
    "\\boxed{}",
    "<think>t</think>",
    "<think>t</think>a",
    "<think>t</think>\n\n a \n",
    "<think>t</think><think>u</think>b",
    "</think>c",
    "<think>open",
    "x <think>t</think> y",
    "<think>\\boxed{1}</think>\\boxed{2}",
    "<answer>5</answer>",
    "<answer> 5 </answer>",
    "<answer>\n5\n</answer>",
    "<answer></answer>",
    "<answer>5",
    "5</answer>",
    "<answer>1</answer><answer>2</answer>",
    "<final>6</final>",
    "<answer>5</answer><final>6</final>",
    "<think>t</think><answer>5</answer>",
    "<think>\nt\n</think>\n<answer>\n5\n</answer>",
    "<think>\nt\n</think>\n<answer>\n5\n</answer>\n",
    "<answer>5</answer><think>t</think>",
    "<think>t</think> mid <answer>5</answer> tail",
    "head <think>t</think><answer>5</answer>",
    "<think></think><answer></answer>",
    "<ANSWER>5</ANSWER>",
    "<answer a='1'>5</answer>",
    "<answer><b>x</b></answer>",
    "<answer>a\nb\nc</answer>",
    "<answer>é ✓ 日本</answer>",
    "<answer><answer>5</answer></answer>",
    "#### 7",
    "a #### 7 #### 8",
    "$1,234.50 and 7",
    "<code>print(1)</code>",
    "<think>t</think><code>x = 1</code>",
    "<think>t</think>\n<code>x = 1</code>\n<answer>5</answer>",
)
_PIECES = (
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<final>",
    "</final>",
    " ",
    "\n",
    "a",
    "5",
)


def texts() -> list[str]:
    """Return the texts above and enough mixtures of tags to make a hundred."""
    mixer = random.Random(7)
    mixed = ["".join(mixer.choices(_PIECES, k=mixer.randrange(3, 9))) for _ in range(60)]
    return [*TEXTS, *mixed]


def xml_parser(url: str) -> Any:
    """XMLParser in several forms, over a hundred texts."""
    import verifiers as vf

    made = {
        "answer": lambda: vf.XMLParser(["answer"]),
        "think": lambda: vf.XMLParser(["think", "answer"]),
        "either": lambda: vf.XMLParser(["think", ("answer", "final")]),
        "code": lambda: vf.XMLParser(["think", ("code", "answer")], answer_field="answer"),
        "upper": lambda: vf.XMLParser(["answer"], extract_fn=str.upper),
        "other": lambda: vf.XMLParser(["think", "answer"], answer_field="think"),
        "nowhere": lambda: vf.XMLParser(["think"], answer_field="nowhere"),
    }
    found: dict[str, Any] = {}
    for name, make in made.items():
        parser = make()
        found[name] = {
            "fields": parser.get_fields(),
            "format": parser.get_format_str(),
            "answer_field": parser.answer_field,
            "texts": {text: about_xml(parser, text) for text in texts()},
            "formatted": attempt(lambda: parser.format(think="t", answer="5")),
            "formatted_short": attempt(lambda: parser.format(think="t")),
            "conversation": conversations(parser),
        }
    for name, fields in {
        "empty": [],
        "empty tuple": [()],
        "numbers": [1],
        "number in tuple": [("a", 1)],
        "twice": ["a", "a"],
        "alternatives": ["a", ("b", "a")],
    }.items():
        found[name] = attempt(lambda: vf.XMLParser(fields).get_fields())
    return found


def about_xml(parser: Any, text: str) -> Any:
    """Return what an XML parser makes of one text."""
    message = [{"role": "assistant", "content": text}]
    reward = parser.get_format_reward_func()
    return {
        "parse": attempt(lambda: vars(parser.parse(text))),
        "no strip": attempt(lambda: vars(parser.parse(text, strip=False))),
        "last": attempt(lambda: vars(parser.parse(text, last=True))),
        "answer": attempt(lambda: parser.parse_answer(message)),
        "text answer": attempt(lambda: parser.parse_answer(text)),
        "reward": attempt(lambda: reward(message)),
    }


def conversations(parser: Any) -> Any:
    """Return what a parser makes of conversations."""
    said = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "<answer>u</answer>"},
        {"role": "assistant", "content": "<think>a</think><answer>1</answer>"},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
        {"role": "assistant", "content": "nothing"},
        {"role": "user", "content": "bye"},
    ]
    reward = parser.get_format_reward_func()
    return {
        "answer": attempt(lambda: parser.parse_answer(said)),
        "none": attempt(lambda: parser.parse_answer(said[:2])),
        "empty": attempt(lambda: parser.parse_answer([])),
        "no content": attempt(lambda: parser.parse_answer([{"role": "assistant"}])),
        "content None": attempt(
            lambda: parser.parse_answer([{"role": "assistant", "content": None}])
        ),
        "assistant": parser.get_assistant_messages(said),
        "system": parser.get_system_messages(said),
        "user": parser.get_user_messages(said),
        "tool": parser.get_tool_messages(said),
        "reward": attempt(lambda: reward(said)),
        "reward of none": attempt(lambda: reward([])),
        "reward name": reward.__name__,
        "reward parameters": list(inspect.signature(reward).parameters),
        "reward with more": attempt(lambda: reward(completion=said, answer="1", state={})),
    }


def other_parsers(url: str) -> Any:
    """Parser, ThinkParser and MaybeThinkParser over a hundred texts."""
    import verifiers as vf

    made = {
        "plain": lambda: vf.Parser(),
        "boxed": lambda: vf.Parser(extract_fn=vf.extract_boxed_answer),
        "think": lambda: vf.ThinkParser(),
        "think boxed": lambda: vf.ThinkParser(extract_fn=vf.extract_boxed_answer),
        "maybe": lambda: vf.MaybeThinkParser(),
        "maybe boxed": lambda: vf.MaybeThinkParser(vf.extract_boxed_answer),
    }
    found: dict[str, Any] = {}
    for name, make in made.items():
        parser = make()
        reward = parser.get_format_reward_func()
        found[name] = {
            "conversation": conversations(parser),
            "logger": parser.logger.name,
            "texts": {
                text: {
                    "parse": attempt(lambda: parser.parse(text)),
                    "answer": attempt(lambda: parser.parse_answer(text)),
                    "message": attempt(
                        lambda: parser.parse_answer([{"role": "assistant", "content": text}])
                    ),
                    "reward": attempt(lambda: reward([{"role": "assistant", "content": text}])),
                }
                for text in texts()
            },
        }
    return found


def text_helpers(url: str) -> Any:
    """Helpers of texts and messages."""
    from verifiers.utils import data_utils, message_utils

    messages = [
        {"role": "system", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "a", "image_url": None}]},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "x"}},
                {"type": "input_audio", "input_audio": {"data": "A"}},
                "bare",
            ],
        },
        {
            "role": "assistant",
            "content": "c",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    joins = ([], ["a", "b"], [["x"], "b"], [[{"role": "user"}], {"role": "tool"}], ["a", []])
    return {
        "boxed": {text: data_utils.extract_boxed_answer(text) for text in texts()},
        "hash": {text: data_utils.extract_hash_answer(text) for text in texts()},
        "numeric": {text: data_utils.strip_non_numeric(text) for text in texts()},
        "prompts": [data_utils.THINK_BOXED_SYSTEM_PROMPT, data_utils.BOXED_SYSTEM_PROMPT],
        "nones": message_utils.strip_nones_from_content(messages),
        "joined": [attempt(lambda: message_utils.concat_messages(join)) for join in joins],
        "printable": [
            attempt(lambda: message_utils.message_to_printable(message)) for message in messages
        ],
        "all printable": message_utils.messages_to_printable(messages),
        "printable text": message_utils.messages_to_printable("text"),
        "sanitized": message_utils.sanitize_tool_calls(messages),
        "sanitized text": message_utils.sanitize_tool_calls("text"),
        "overlong": [
            message_utils.get_overlong_prompt_dummy_response(kind)
            for kind in ("chat", "completion")
        ],
        "overlong of neither": attempt(
            lambda: message_utils.get_overlong_prompt_dummy_response("neither")
        ),
    }


def example_data(url: str) -> Any:
    """Every example data set, from small data in the same format."""
    import verifiers as vf
    from verifiers.utils.data_utils import format_dataset, get_preprocess_fn

    names = (
        *("aime2024", "aime2025", "amc2023", "gsm8k", "math", "math500", "mmlu", "mmlu_pro"),
        *("openbookqa", "openrs", "openrs_easy", "openrs_hard", "prime_code", "gpqa_diamond"),
        *("gpqa_main", "nothing"),
    )
    found: dict[str, Any] = {}
    for name in names:
        random.seed(3)
        found[name] = attempt(lambda: rows(vf.load_example_dataset(name), 12))
        random.seed(3)
        found[f"{name}, 5"] = attempt(lambda: rows(vf.load_example_dataset(name, n=5, seed=2), 12))
        found[f"{name}, function"] = attempt(lambda: callable(get_preprocess_fn(name)))
    found["split"] = attempt(lambda: rows(vf.load_example_dataset("gsm8k", split="train")))
    found["no split"] = attempt(lambda: rows(vf.load_example_dataset("gsm8k", split="dev")))
    found["no name"] = attempt(lambda: rows(vf.load_example_dataset()))
    plain = vf.load_example_dataset("math500", n=3)
    found["formatted"] = rows(
        format_dataset(plain, "Be brief.", [{"role": "user", "content": "x"}])
    )
    renamed = plain.rename_columns({"question": "q", "answer": "a"})
    found["other keys"] = rows(
        format_dataset(renamed, question_key="q", answer_key="a", map_kwargs={})
    )
    return found


def tool_schemas(url: str) -> Any:
    """Schemas of tools with every kind of annotation and docstring."""
    sys.path.insert(0, str(Path(__file__).parent / "environments"))
    import calls
    from verifiers.utils.tool_utils import convert_func_to_oai_tool

    def bare(a, b=1, *, c="x"):
        pass

    def keywords(a: int, **kwargs) -> int:
        """Keywords."""
        return a

    def listed(a: list[str], b: tuple[int, str], c: set[int]) -> None:
        """Lists.

        Args:
            a: first
                and more of it
            b: second

        Raises:
            ValueError: never
        """

    def long(a: str) -> str:
        """One line.

        Another paragraph
        of two lines.

        Args:
            a (str, optional): Text: with a colon. Defaults to "x".

        Example:
            long("x")
        """
        return a

    def sphinx(a: str, b: int) -> str:
        """Sphinx.

        :param a: The text.
        :type a: str
        :param b: The number.
        :returns: Something.
        """
        return a

    class Callable:
        def method(self, a: int, b: float | None = None) -> float:
            """A method."""
            return a

        def __call__(self, a: int) -> int:
            """Call it."""
            return a

    funcs = [
        *(calls.plus, calls.find, calls.merge, calls.move, calls.plain, calls.fails),
        *(calls.nothing, bare, keywords, listed, long, sphinx, Callable().method),
    ]
    found = {func.__name__: attempt(lambda: convert_func_to_oai_tool(func)) for func in funcs}
    found["object"] = attempt(lambda: convert_func_to_oai_tool(Callable()))
    return found


def decorators(url: str) -> Any:
    """What the decorators leave on a function, and small asynchronous helpers."""
    import verifiers as vf
    from verifiers.utils.async_utils import NullAsyncContext, maybe_await, maybe_semaphore

    found: dict[str, Any] = {}
    for name in ("stop", "cleanup", "teardown"):
        decorator = getattr(vf, name)

        def plain(self):
            pass

        def ranked(self):
            pass

        decorator(plain)
        decorator(priority=4)(ranked)
        found[name] = [
            {key: getattr(func, key, "missing") for key in (name, f"{name}_priority")}
            for func in (plain, ranked)
        ]

    async def later(value):
        return value + 1

    async def use() -> Any:
        return [
            await maybe_await(later, 1),
            await maybe_await(lambda value: value, 5),
            await maybe_await(later, value=3),
            *[
                [isinstance(await maybe_semaphore(limit), kind) for limit in (3, 0, -1, None)]
                for kind in (asyncio.Semaphore, NullAsyncContext)
            ],
            isinstance(await maybe_semaphore(), NullAsyncContext),
        ]

    return {**found, "async": asyncio.run(use())}


def states_by_hand(url: str) -> Any:
    """States made by hand, scored by rubrics without an environment."""
    import verifiers as vf
    from verifiers.utils.async_utils import NullAsyncContext

    def make(n: int, text: str) -> Any:
        state = vf.State(
            input={
                "prompt": [{"role": "user", "content": "q"}],
                "answer": str(n),
                "task": "t",
                "info": {"n": n},
                "example_id": n,
            }
        )
        state["completion"] = [{"role": "assistant", "content": text}]
        state["trajectory"] = []
        state["timing"] = {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0}
        return state

    def has(completion, answer, **kwargs):
        return float(answer in completion[-1]["content"])

    async def length(completion):
        return len(completion[-1]["content"])

    def relative(completions):
        return [float(len(c[-1]["content"])) for c in completions]

    def shown(state: Any) -> Any:
        return {name: canonical(state[name]) for name in sorted(state) if name != "timing"}

    async def one(made: Any) -> Any:
        state = make(1, "it is 1")
        await made.score_rollout(state, NullAsyncContext())
        return shown(state)

    async def several(made: Any) -> Any:
        states = [make(n, f"it is {n * 2}") for n in range(3)]
        await made.score_group(states, asyncio.Semaphore(2))
        return [shown(state) for state in states]

    async def keywords(made: Any) -> Any:
        state = make(1, "it is 1")
        await made.score_rollout(state=state, score_sem=NullAsyncContext())
        states = [state]
        await made.score_group(states=states, score_sem=NullAsyncContext())
        return shown(state)

    made = {
        "plain": lambda: vf.Rubric(funcs=[has, length], weights=[1.0, 0.1]),
        "with group": lambda: vf.Rubric(funcs=[has, relative]),
        "empty": lambda: vf.Rubric(),
        "group": lambda: vf.RubricGroup([vf.Rubric(funcs=[has]), vf.Rubric(funcs=[length, has])]),
        "math": lambda: vf.MathRubric(),
        "tools": lambda: vf.ToolRubric(),
    }
    found: dict[str, Any] = {}
    for name, build in made.items():
        found[name] = {
            "rubric": attempt(lambda: rubric(build())),
            "rollout": attempt(lambda: asyncio.run(one(build()))),
            "group": attempt(lambda: asyncio.run(several(build()))),
            "keywords": attempt(lambda: asyncio.run(keywords(build()))),
            "names": attempt(lambda: build()._get_reward_func_names()),
            "weights": attempt(lambda: build()._get_reward_weights()),
            "num": attempt(lambda: len(build()._get_reward_funcs())),
        }
    found["no rubrics"] = attempt(lambda: vf.RubricGroup([]))
    found["state"] = {
        "plain": attempt(lambda: dict(vf.State(a=1))),
        "without input": attempt(lambda: vf.State(prompt="x")["prompt"]),
        "fields": vf.State.INPUT_FIELDS,
        "update": attempt(updated_state),
        "copy": attempt(lambda: type(make(1, "x").copy()).__name__),
        "in": attempt(lambda: ["prompt" in make(1, "x"), "answer" in make(1, "x")]),
        "del": attempt(lambda: make(1, "x").pop("completion")),
    }
    return found


def updated_state() -> Any:
    """Return a state after the ways of changing a dict."""
    import verifiers as vf

    state = vf.State(input={"prompt": "p", "task": "t", "example_id": 0})
    state["answer"] = "new"
    state["prompt"] = "changed"
    state.update(task="other", more=1)
    state.setdefault("info", {"a": 1})
    return [dict(state), state["task"], state.get("info"), len(state), sorted(state)]


def part(url: str, name: str) -> str:
    """Return a base URL whose requests are counted apart from those of other parts."""
    case = url.split("/")[3]
    return url.replace(f"/{case}/", f"/{case}.{name.replace(' ', '_')}/")


def run(url: str, act: Any, **settings: Any) -> Any:
    """Load a small environment, run `act(env, client)` and return its result."""
    sys.path.insert(0, str(Path(__file__).parent / "environments"))
    import turns
    from openai import AsyncOpenAI

    async def go() -> Any:
        async with AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=0) as client:
            return await asyncio.wait_for(act(turns.hooked(**settings), client), 60)

    return asyncio.run(go())


def files(folder: Path) -> dict[str, Any]:
    """Return saved results: names, and contents without times."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        # Compiled modules are the interpreter's, and there only if it may write them.
        if path.is_file() and path.suffix != ".pyc":
            name = path.relative_to(folder).as_posix()
            parts = [part for part in name.split("/") if len(part) != 8]
            text = path.read_text()
            if path.suffix == ".jsonl":
                rows = [json.loads(line) for line in text.splitlines()]
                content: Any = sorted((untimed(row) for row in rows), key=json.dumps)
            elif path.suffix == ".json":
                content = untimed(json.loads(text))
            else:
                content = text
            found["/".join(parts)] = content
    return found


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    """Return a record with 0 for each time in it, and without the server's address."""
    times = ("generation_ms", "scoring_ms", "total_ms", "time_ms")
    return {name: 0 if name in times else value for name, value in row.items()}


def generate_forms(url: str) -> Any:
    """`generate` with every form of inputs and every parameter."""
    from datasets import Dataset

    one = {"prompt": [{"role": "user", "content": "What is 1 plus 4?"}], "answer": "5"}
    other = {"prompt": [{"role": "user", "content": "What is 2 plus 5?"}], "answer": "7"}
    items = [{**(other if n > 1 else one), "example_id": n // 2, "task": "t"} for n in range(4)]
    forms: dict[str, Any] = {
        "list": items,
        "dataset": Dataset.from_list(items),
        "no ids": [one],
        "no task": [{**one, "example_id": 3}],
        "info text": [{**one, "example_id": 3, "task": "t", "info": '{"a": 1}'}],
        "empty": [],
        "dict": {"prompt": [one["prompt"]], "answer": ["5"], "example_id": [0], "task": ["t"]},
        "text": [{"prompt": "What?", "answer": "5", "example_id": 0, "task": "t"}],
    }
    settings: dict[str, dict[str, Any]] = {
        "limits": {"max_concurrent_generation": 1, "max_concurrent_scoring": 1},
        "none": {"max_concurrent": None},
        "sampling": {"sampling_args": {"temperature": 0.1, "max_tokens": 20, "top_p": None}},
        "more tokens": {"sampling_args": {"max_completion_tokens": 7, "n": 1}},
        "columns": {"state_columns": ["notes", "left"]},
        "unknown": {"nothing": 1},
    }
    found: dict[str, Any] = {}
    for name, form in forms.items():
        found[name] = attempt(
            lambda: run(
                part(url, name), lambda env, client: told(env.generate(form, client, "model"))
            )
        )
    for name, given in settings.items():
        found[name] = attempt(
            lambda: run(
                part(url, name),
                lambda env, client: told(
                    env.generate(items, client=client, model="model", use_tqdm=False, **given)
                ),
            )
        )
    given = {"max_tokens": 9, "temperature": 0.5}
    attempt(
        lambda: run(
            part(url, "given"), lambda env, client: env.generate(items, client, "model", given)
        )
    )
    found["caller's sampling"] = given
    return found


async def told(playing: Any) -> Any:
    """Return results as JSON."""
    with contextlib.redirect_stderr(io.StringIO()):
        return outputs(await playing)


def saved_results(url: str) -> Any:
    """What `save_results` writes, with the ways of saying where."""
    cases: dict[str, dict[str, Any]] = {
        "path": {"results_path": Path("saved_path"), "save_results": True},
        "default": {"save_results": True},
        "columns": {
            "results_path": Path("saved_columns"),
            "save_results": True,
            "state_columns": ["notes", "left", "absent"],
        },
        "every": {"results_path": Path("saved_every"), "save_results": True, "save_every": 1},
        "not asked": {"results_path": Path("saved_not")},
    }
    found: dict[str, Any] = {}
    for name, given in cases.items():
        folder = Path(f"saved_{name}".replace(" ", "_")).resolve()
        folder.mkdir()
        os.chdir(folder)
        try:
            found[name] = attempt(
                lambda: run(
                    part(url, name),
                    lambda env, client: told(
                        env.evaluate(
                            client=client,
                            model="org/model",
                            num_examples=2,
                            **given,
                        )
                    ),
                )["metadata"]
            )
            found[f"{name}, files"] = files(folder)
        finally:
            os.chdir(folder.parent)
    return found


def results_by_hand(url: str) -> Any:
    """`eval_utils` on results: what is printed, the data set, the name on the hub."""
    from verifiers.utils import eval_utils

    def act(env: Any, client: Any) -> Any:
        return env.evaluate(
            client=client,
            model="model",
            num_examples=2,
            rollouts_per_example=2,
            max_concurrent=1,
            use_tqdm=False,
        )

    results = run(url, act)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        eval_utils.print_results(results)
    dataset = eval_utils.make_dataset(results)
    eval_utils.save_to_disk(dataset, {"a": 1}, Path("by_hand") / "x")
    lines = printed.getvalue().splitlines()
    return {
        "printed": [line for line in lines if not line.startswith("Provider")],
        "columns": sorted(dataset.column_names),
        "rows": sorted(
            (canonical(untimed(row)) for row in dataset.to_list()),
            key=lambda row: json.dumps(row, sort_keys=True),
        ),
        "metadata": sorted(eval_utils.sanitize_metadata(results["metadata"])),
        "hub": eval_utils.get_hf_hub_dataset_name(results),
        "saved": sorted(path.name for path in Path("by_hand/x").iterdir()),
        "mapping": {
            "in": ["reward" in results, "nothing" in results],
            "get": [results.get("nothing", 7), len(results.get("reward"))],
            "keys": sorted(results.keys()),
            "items": sorted(name for name, _ in results.items()),
            "len": len(results),
            "dict": sorted(dict(results)),
            "metadata": sorted(results["metadata"].keys()),
            "metadata get": results["metadata"].get("nothing"),
            "is dict": [isinstance(results, dict), isinstance(results["metadata"], dict)],
            "path": type(results["metadata"]["path_to_save"]).__name__,
            "date": len(results["metadata"]["date"]) > 10,
        },
    }


def synchronous(url: str) -> Any:
    """`generate_sync` and `evaluate_sync`, with both kinds of clients."""
    sys.path.insert(0, str(Path(__file__).parent / "environments"))
    import turns
    from openai import AsyncOpenAI, OpenAI

    def client(kind: Any, name: str) -> Any:
        where = part(url, kind.__name__ + name)
        return kind(base_url=where, api_key="EMPTY", max_retries=0)

    def reward(results: Any) -> Any:
        return [canonical(results["reward"]), canonical(results["completion"])]

    items = [
        {"prompt": [{"role": "user", "content": "x"}], "answer": "", "example_id": 0, "task": "t"}
    ]
    return {
        kind.__name__: {
            "evaluate": attempt(
                lambda: reward(
                    turns.hooked().evaluate_sync(client(kind, "evaluate"), "model", num_examples=2)
                )
            ),
            "generate": attempt(
                lambda: reward(
                    turns.hooked().generate_sync(items, client(kind, "generate"), model="model")
                )
            ),
        }
        for kind in (OpenAI, AsyncOpenAI)
    }


def by_hand(url: str) -> Any:
    """The parts of a rollout called one by one, as notebooks and tests did."""

    async def act(env: Any, client: Any) -> Any:
        row = env.get_dataset(n=1).to_list()[0]
        state = await env.init_state(row, client, "model", {"max_tokens": 9})
        before = state_of(state)
        state = await env.setup_state(state)
        prompt = await env.get_prompt_messages(state)
        response = await env.get_model_response(client, "model", prompt, sampling_args={"n": 1})
        await env.add_model_response(state, prompt, response)
        done = await env.is_completed(state)
        more = await env.get_prompt_messages(state)
        await env._render_completion(state)
        played = await env.rollout(row, client, "model", {"max_tokens": 30})
        from verifiers.utils.async_utils import NullAsyncContext

        again = await env.run_rollout(NullAsyncContext(), row, client, "model", {})
        group = await env.run_group(
            [row, row], client, "model", {}, NullAsyncContext(), NullAsyncContext()
        )
        return {
            "before": before,
            "state": state_of(state),
            "prompt": prompt,
            "more": more,
            "done": done,
            "played": state_of(played),
            "again": state_of(again),
            "group": sorted((state_of(state) for state in group), key=json.dumps),
            "finish": response.choices[0].finish_reason,
            "response": type(response).__name__,
        }

    return canonical(run(url, act))


def datasets_of(url: str) -> Any:
    """`get_dataset` and `get_eval_dataset`: numbers, seeds, too many, none."""
    sys.path.insert(0, str(Path(__file__).parent / "environments"))
    import data_shapes
    import verifiers as vf

    def both() -> Any:
        return data_shapes.few_shot()

    train_only = data_shapes.prompts
    return {
        "all": rows(both().get_dataset(), 9),
        "two": rows(both().get_dataset(n=2), 9),
        "many": rows(both().get_dataset(n=99), 9),
        "seed": rows(both().get_dataset(n=3, seed=5), 9),
        "none": rows(both().get_dataset(n=0), 9),
        "eval": rows(both().get_eval_dataset(n=2, seed=1), 9),
        "eval of train": rows(train_only().get_eval_dataset(n=2), 9),
        "no train": attempt(lambda: rows(data_shapes.eval_only().get_dataset())),
        "inputs": both().get_eval_inputs(2, 2),
        "default inputs": len(both().get_eval_inputs()),
        "attributes": {
            name: canonical(getattr(both(), name, "missing"))
            for name in ("something", "number", "max_workers", "env_id", "env_args")
        },
        "logger": both().logger.name,
        "is group": isinstance(both(), vf.EnvGroup),
        "max_seq_len": attempt(lambda: sized(both())),
    }


def sized(env: Any) -> Any:
    """Return `max_seq_len` after setting it."""
    env.set_max_seq_len(77)
    return env.max_seq_len


def logged(url: str) -> Any:
    """Names and levels of loggers, and what goes where."""
    import verifiers as vf

    logger = logging.getLogger("verifiers")
    found = {"handlers": len(logger.handlers), "level": logger.level, "propagate": logger.propagate}
    caught = io.StringIO()
    with contextlib.redirect_stderr(caught):
        vf.setup_logging("DEBUG", log_format="%(levelname)s %(name)s %(message)s")
        logging.getLogger("verifiers.envs.X").debug("hello")
        vf.setup_logging("WARNING", log_format="%(message)s")
        logging.getLogger("verifiers.envs.X").info("unseen")
        logging.getLogger("verifiers.envs.X").warning("seen")
    vf.setup_logging()
    return {**found, "text": caught.getvalue(), "after": logger.level}


def configs(url: str) -> Any:
    """The configuration types, and `setup_client`."""
    from verifiers.types import ClientConfig, EvalConfig
    from verifiers.utils.client_utils import setup_client
    from verifiers.utils.path_utils import get_eval_results_path, get_results_path

    os.environ["PROBE_KEY"] = "secret"
    config = ClientConfig(
        api_key_var="PROBE_KEY", api_base_url=url, extra_headers={"X-Probe": "1"}, timeout=5
    )
    client = setup_client(config)
    evaluation = EvalConfig(
        env_id="my-env",
        env_args={"a": 1},
        env_dir_path="./environments",
        model="org/model",
        client_config=config,
        sampling_args={},
        num_examples=1,
        rollouts_per_example=2,
        max_concurrent=3,
    )
    Path("environments/my_env").mkdir(parents=True)
    return {
        "config": {**config.model_dump(), "api_base_url": ""},
        "defaults": ClientConfig().model_dump(),
        "evaluation": {**evaluation.model_dump(), "client_config": None},
        "wrong": attempt(lambda: EvalConfig(env_id=1)).get("error"),
        "key": client.api_key,
        "url": str(client.base_url).replace(url, ""),
        "retries": client.max_retries,
        "client": type(client).__name__,
        "path": str(get_results_path("my-env", "org/model"))[:-8],
        "path there": str(get_results_path("my-env", "org/model", Path("x")))[:-8],
        "local": str(get_eval_results_path(evaluation))[:-8],
    }


def endpoints(url: str) -> Any:
    """`load_endpoints` from a folder, a file, nowhere and a file without the table."""
    from verifiers.utils.eval_utils import load_endpoints

    folder = Path("registry")
    folder.mkdir()
    (folder / "endpoints.py").write_text(
        'ENDPOINTS = {"a": {"model": "m", "url": "http://x/v1", "key": "K"}}\n'
    )
    (folder / "other.py").write_text("NOTHING = 1\n")
    return {
        name: attempt(lambda: load_endpoints(str(folder / name)))
        for name in ("", "endpoints.py", "other.py", "missing.py")
    }


def command_line(url: str) -> Any:
    """vf-eval on an environment: what it saves, and its flags."""
    from verifiers.scripts import eval as script

    folder = Path(__file__).parent / "environments"
    sys.path.insert(0, str(folder))
    os.environ["PROBE_KEY"] = "EMPTY"
    Path("configs").mkdir(exist_ok=True)
    Path("configs/endpoints.py").write_text(
        'ENDPOINTS = {"short": {"model": "model", "url": "URL", "key": "PROBE_KEY"}}\n'
    )
    plain = ["turns", "-a", '{"kind": "hooked"}', "-n", "2", "-r", "2", "-s"]
    there = ["-m", "model", "-b", "URL", "-k", "PROBE_KEY"]
    runs: dict[str, list[str]] = {
        "plain": [*plain, *there],
        "endpoint": [*plain, "-m", "short", "-e", "./configs/endpoints.py"],
        "flags": [
            *(*plain, *there, "--header", "X-A: 1", "-C", "notes,left", "-v", "-c", "1"),
            *("-t", "30", "-T", "0.5", "-S", '{"top_p": 0.9}', "-N"),
        ],
        "unknown": [*plain, *there, "--nothing"],
        "no environment": ["no-such-env", *there],
    }
    found: dict[str, Any] = {}
    for name, arguments in runs.items():
        target = Path(f"run_{name.replace(' ', '_')}").resolve()
        target.mkdir()
        (target / "configs").mkdir()
        registry = Path("configs/endpoints.py").read_text().replace("URL", part(url, name))
        (target / "configs/endpoints.py").write_text(registry)
        arguments = [item.replace("URL", part(url, name)) for item in arguments]
        found[name] = attempt(lambda: script_run(script.main, arguments, target))
        found[f"{name}, files"] = {
            path: content
            for path, content in files(target).items()
            if not path.endswith("endpoints.py")
        }
    found["defaults"] = attempt(lambda: script.get_env_eval_defaults("no-such-env"))
    return found


def script_run(main: Any, arguments: list[str], folder: Path) -> Any:
    """Run a script's `main` with arguments in a folder; return its exit code."""
    before, sys.argv = sys.argv, ["vf-eval", *arguments]
    here = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main()
    except SystemExit as error:
        return error.code
    finally:
        sys.argv = before
        os.chdir(here)
    return "returned"


TRAINERS = (
    *("RLTrainer", "RLConfig", "GRPOTrainer", "GRPOConfig", "grpo_defaults", "lora_defaults"),
    *("get_model", "get_model_and_tokenizer"),
)


def errors_of_load(url: str) -> Any:
    """How `load_environment` fails."""
    import verifiers as vf

    sys.path.insert(0, str(Path(__file__).parent / "environments"))
    tries: dict[str, Any] = {
        "missing": lambda: vf.load_environment("no-such-env"),
        "no function": lambda: vf.load_environment("json"),
        "wrong argument": lambda: vf.load_environment("mixed", nothing=1),
        "fails": lambda: vf.load_environment("mixed", kind="wrong_names"),
        "works": lambda: type(vf.load_environment("mixed", kind="pair")).__name__,
        "owner": lambda: vf.load_environment("owner/mixed", kind="pair").env_id,
        "id": lambda: vf.load_environment("mixed", kind="pair").env_id,
        "args": lambda: vf.load_environment("mixed", kind="pair").env_args,
    }
    return {name: attempt(act) for name, act in tries.items()}


def attributes_of_response(url: str) -> Any:
    """The parts of a response of a step that rewards read, with and without tokens."""

    async def act(env: Any, client: Any) -> Any:
        found = []
        for sampling in (
            {"max_tokens": 10},
            {"logprobs": True, "extra_body": {"return_token_ids": True}},
        ):
            results = await env.evaluate(
                client, "model", sampling_args=sampling, num_examples=1, use_tqdm=False
            )
            state = results["state"][0]
            found.append([part(step) for step in state["trajectory"]])
            found.append(attempt(lambda: len(state["responses"])))
            found.append(attempt(lambda: state["response"].id))
        return found

    def part(step: Any) -> Any:
        response = step["response"]
        choice = response.choices[0]
        return {
            "content": choice.message.content,
            "role": choice.message.role,
            "finish": choice.finish_reason,
            "index": choice.index,
            "refusal": getattr(choice.message, "refusal", "missing"),
            "tool_calls": choice.message.tool_calls,
            "logprobs": attempt(lambda: [item.logprob for item in choice.logprobs.content]),
            "tokens": attempt(lambda: [item.token for item in choice.logprobs.content]),
            "ids": attempt(lambda: list(choice.token_ids)),
            "prompt ids": attempt(lambda: list(response.prompt_token_ids)),
            "usage": [
                response.usage.prompt_tokens,
                response.usage.completion_tokens,
                response.usage.total_tokens,
            ],
            "model": response.model,
            "object": response.object,
            "created": response.created,
            "dump": canonical(response.model_dump(exclude_none=True)),
            "json": sorted(json.loads(response.model_dump_json())),
            "isinstance": type(response).__mro__[0].__name__,
        }

    return run(url, act)


def failing(url: str) -> Any:
    """The last line of the probes: an unknown name in the package is an AttributeError."""
    import verifiers as vf

    return {
        "unknown": attempt(lambda: vf.no_such_name),
        "version": hasattr(vf, "__version__"),
        "all": sorted(set(vf.__all__) - set(TRAINERS)),
        "failure": failure(ValueError("x")),
    }


def defects(url: str) -> Any:
    """Where verifiers does what nobody wants."""
    sys.path.insert(0, str(Path(__file__).parent / "environments"))
    import turns

    shuffled = turns.hooked()
    before = list(shuffled.get_dataset()["question"])
    shuffled.get_dataset(seed=3)
    made: list[Any] = []
    thread = threading.Thread(
        target=lambda: made.append(attempt(lambda: type(turns.hooked()).__name__))
    )
    thread.start()
    thread.join()
    cleaned: list[int] = []

    async def act(env: Any, client: Any) -> Any:
        async def clean(state: Any) -> None:
            cleaned.append(state["example_id"])

        env._cleanup_handlers.append(clean)
        return await env.evaluate(client, "model", num_examples=1, use_tqdm=False)

    broken = part(url, "broken").replace("/solver/", "/broken/")
    return {
        "shuffled for everybody": before != list(shuffled.get_dataset()["question"]),
        "in a thread": made[0],
        "failure": attempt(lambda: run(broken, act)).get("error"),
        "cleaned after a failure": len(cleaned),
    }
