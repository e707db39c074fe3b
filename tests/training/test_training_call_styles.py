"""GRPO on a tool in every style of calls: read with their types, trained whole, and learned.

A tiny model with the special tokens and the template of a family is warmed up on a teacher's games,
in which the teacher often picks a wrong number, and is then trained to pick the right one.
"""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

import rolltree as rt
from rolltree.environments.tools import raw_tool_calls
from rolltree.inference import ChatRenderer
from rolltree.inference.models import TinyConfig, load_model, make_tiny
from rolltree.inference.models.made import CHAT_TEMPLATE
from rolltree.rollouts.decode import decode_results
from rolltree.testing import ScriptedAnswer

pytestmark = [pytest.mark.long, pytest.mark.slow]

DIGITS = "2468"
NUM_STEPS = 16
TESTS = Path(__file__).parents[1]
FAMILIES = runpy.run_path(str(TESTS / "inference" / "formats" / "families.py"))["FAMILIES"]
KIT = runpy.run_path(str(TESTS / "chat_templates.py"))
spec = util.spec_from_file_location("recipes", TESTS.parent / "examples" / "run.py")
assert spec is not None
recipes = util.module_from_spec(spec)
spec.loader.exec_module(recipes)

# Calls in Python, which may stand bare (Llama 4's manner).
PYTHONIC = """\
{{- '<|begin_of_text|>' }}
{%- if tools %}{{- '<|header_start|>system<|header_end|>\\n\\n[func_name1(name=value), ...]' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|eot|>' }}{%- endif %}
{%- for m in messages %}
{{- '<|header_start|>' + ('ipython' if m.role == 'tool' else m.role) + '<|header_end|>\\n\\n' }}
{%- if m.tool_calls %}{{- '[' }}
{%- for call in m.tool_calls %}{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments | items %}
{{- key + '=' + (value | tojson) + ('' if loop.last else ', ') }}
{%- endfor %}{{- ')' + ('' if loop.last else ', ') }}{%- endfor %}{{- ']' }}
{%- else %}{{- m.content | tojson if m.role == 'tool' else m.content | trim }}
{%- endif %}{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""

# A section of calls with ids, which results name (Kimi K2's manner).
SECTIONS = """\
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id }}
{{- '\\n' + m.content }}
{%- else %}{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content }}
{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}
{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{{- (call.function.arguments | tojson) + '<|tool_call_end|>' }}
{%- endfor %}{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{%- endif %}{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""


@dataclass(frozen=True)
class Style:
    """A family's template, and how its models write a call and an answer.

    Args:
        formats: the names of the formats of calls and of reasoning that the template shows.
        template: the chat template.
        family: the name in `FAMILIES` of how a call is spelled.
        special: the special tokens.
        ends: more of them, which end a turn: the first an answer, the last a call.
        call: what an answer with a thought and a call looks like.
        answer: the last answer.
    """

    formats: tuple[str, str]
    template: str
    family: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    call: str
    answer: str = "ok"

    @property
    def thinks(self) -> bool:
        """Whether answers have reasoning."""
        return "{thought}" in self.call


CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
LLAMA4 = ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>")
CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
KIMI = (
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
STYLES = {
    "hermes": Style(
        ("hermes", "think"),
        CHAT_TEMPLATE,
        "Qwen 2.5 and 3, Hermes",
        CHATML,
        ("<|im_end|>",),
        "<think>\n{thought}\n</think>\n\n{call}",
    ),
    "qwen_xml": Style(
        ("qwen_xml", "think"),
        KIT["ITEMS"],
        "Qwen3-Coder",
        CHATML,
        ("<|im_end|>",),
        "<think>\n{thought}\n</think>\n\n{call}",
    ),
    "llama3": Style(
        ("llama3", "none"), KIT["ONE_CALL"], "Llama 3", LLAMA3, ("<|eot_id|>",), "{call}"
    ),
    "llama4": Style(("llama4", "none"), PYTHONIC, "Llama 4", LLAMA4, ("<|eot|>",), "{call}"),
    "harmony": Style(
        ("harmony", "harmony"),
        KIT["CHANNELS"],
        "gpt-oss",
        CHANNELS,
        ("<|return|>", "<|call|>"),
        "<|channel|>analysis<|message|>{thought}<|end|>{call}",
        "<|channel|>final<|message|>ok",
    ),
    "kimi_k2": Style(
        ("kimi_k2", "none"),
        SECTIONS,
        "Kimi K2",
        KIMI,
        ("<|im_end|>",),
        "<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>",
    ),
}


def make_model(style: Style, folder: Path) -> tuple[Any, Any]:
    """Make a tiny model that has the style's tokens, and return it with its tokenizer."""
    shape = TinyConfig(hidden_size=64, num_layers=2, intermediate_size=192, max_context=1024)
    make_tiny(folder, shape)
    model, tokenizer = load_model(str(folder))
    tokenizer.add_tokens([AddedToken(t, special=True) for t in (*style.special, *style.ends)])
    tokenizer.eos_token, tokenizer.chat_template = style.ends[0], style.template
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in style.ends]
    model.generation_config.eos_token_id = ends
    model.config.eos_token_id = ends[0]
    return model, tokenizer


def pick(code: str, n: int) -> str:
    """Pick a number."""
    return "ok"


def calls_of(completion: rt.Messages) -> list[tuple[str, dict[str, Any]]]:
    """Return name and arguments of each call as the model's answers were read."""
    assert not isinstance(completion, str)
    calls = [call for message in completion for call in raw_tool_calls(message)]
    return [(call.name, json.loads(call.arguments)) for call in calls]


@rt.run_inline
def right(completion: rt.Messages, answer: str) -> float:
    """1 if the model picked what the question names."""
    return float(calls_of(completion) == [("pick", {"code": f"{answer}0", "n": int(answer)})])


@rt.run_inline
def called(completion: rt.Messages) -> float:
    """1 if a call was read."""
    return float(bool(calls_of(completion)))


@rt.run_inline
def thought(completion: rt.Messages, answer: str) -> float:
    """1 if the reasoning was told from the content, and is what the teacher thinks."""
    return float(completion[0].get("reasoning_content") == answer)


@rt.run_inline
def closed(completion: rt.Messages, parser: Any) -> float:
    """1 if a parser finds the last answer, without marks."""
    return float(parser.parse_answer(completion) == "ok")


def make_environment() -> rt.Environment:
    # A digit that is repeated is found sooner by a model that begins with nothing.
    rows = [{"question": digit * 8, "answer": digit} for _ in range(25) for digit in DIGITS]
    rubric = rt.Rubric([right], parser=rt.MaybeThinkParser())
    for metric in (called, thought, closed):
        rubric.add_metric(metric)
    return rt.ToolEnv(
        [pick], max_turns=3, dataset=rows, eval_dataset=rows, rubric=rubric, env_id="pick"
    )


def teacher(style: Style, renderer: ChatRenderer) -> Callable[[rt.Messages], ScriptedAnswer]:
    """Return a player who writes calls in this style, with any number four times out of five."""
    rng, spell = random.Random(0), FAMILIES[style.family][1]

    def play(messages: rt.Messages) -> ScriptedAnswer:
        if messages[-1]["role"] == "tool":
            text, end = style.answer, style.ends[0]
        else:
            digit = messages[-1]["content"][0]
            n = int(rng.choice(DIGITS) if rng.random() < 0.8 else digit)
            written = spell("pick", {"code": f"{digit}0", "n": n})
            text, end = style.call.format(thought=digit, call=written), style.ends[-1]
        text = text.removesuffix(end) + end
        return ScriptedAnswer(text, ids=renderer.encode_text(text, start=False).tolist())

    return play


def warm_model(name: str, style: Style, environment: rt.Environment, folder: Path) -> str:
    """Fine-tune a tiny model on the teacher's games; return its folder."""
    model, tokenizer = make_model(style, folder / "made")
    renderer = ChatRenderer(tokenizer)
    assert renderer.formats == style.formats
    client = rt.ScriptedClient(teacher(style, renderer), renderer=renderer)
    games = recipes.play_games(
        environment, client, folder / "games", seed=0, num_games=100, keep=None
    )
    for num_steps, lr in ((80, 5e-3), (25, 1e-3), (10, 3e-4)):
        recipes.fine_tune(
            model, games, seed=0, num_steps=num_steps, batch_size=32, lr=lr, what=name
        )
    for part in (model, tokenizer):
        part.save_pretrained(folder / "warm")
    return str(folder / "warm")


@pytest.mark.parametrize("name", STYLES)
def test_calls_in_this_style_are_learned(name: str, tmp_path: Path) -> None:
    style, environment = STYLES[name], make_environment()
    report = rt.train(
        environment=environment,
        model=warm_model(name, style, environment, tmp_path),
        run_dir=str(tmp_path / "run"),
        engine={"max_batch": 64, "max_context": 1024},
        sampling={"temperature": 1.0, "max_tokens": 120},
        algorithm={"name": "grpo", "groups_per_step": 8, "group_size": 8},
        optim={"lr": 3e-4},
        train={"num_steps": NUM_STEPS, "share_prefix_across": "step", "num_threads": 1},
        eval={"before": True, "after": True},
        checkpoint={"export": False},
        quiet=True,
    )
    before, after = (
        {key: metric["mean"] for key, metric in report.evaluations[phase]["metrics"].items()}
        for phase in ("eval_before", "eval_after")
    )
    # More rollouts than an evaluation has, of weights that have hardly changed.
    assert sum(step["metrics/called"] for step in report.metrics[:4]) / 4 > 0.9
    assert before["called"] > 0.85
    assert before["closed"] > 0.85
    assert before["thought"] > 0.85 if style.thinks else before["thought"] == 0

    with report.run as run:
        results = decode_results(list(run.rollouts(phase="train")))
    states = [state for result in results for state in result.states]
    assert len(states) == NUM_STEPS * 64
    steps = [step for state in states for step in state["trajectory"]]
    # Every sampled token is trained, or counted with its group without an advantage.
    sampled = sum(len(step["tokens"]["completion_ids"]) for step in steps)
    for metric, value in {
        "train/num_records train/num_skipped_records": sampled,
        "rollout/total_sampled_tokens": sampled,
        "masked/num_tokens samples/skipped_tokens": 0,
        "samples/break_rate error/mean": 0,
    }.items():
        assert sum(step[key] for step in report.metrics for key in metric.split()) == value
    for step in report.metrics:
        assert step["train/sampling/sampling_logp_difference/max"] < 1e-3

    calls = [call for state in states for call in calls_of(state["completion"])]
    codes = [arguments["code"] for _, arguments in calls if "code" in arguments]
    numbers = [arguments["n"] for _, arguments in calls if "n" in arguments]
    assert {f"{digit}0" for digit in DIGITS} <= set(codes)
    # JSON and Python say what a value is, and a model that samples may write a number; tags do not.
    least = 1.0 if style.formats[0] == "qwen_xml" else 0.99
    assert sum(type(code) is str for code in codes) >= least * len(codes)
    assert sum(type(n) is int for n in numbers) > 0.97 * len(numbers)
    assert len(codes) > 0.8 * len(states)

    # Its interval has room above 0, so it is more than noise.
    assert recipes.figures_of(report.run_path)["difference"][1] > 0.05
    assert after["called"] > 0.7
