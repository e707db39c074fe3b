"""Share of prompts that extend the previous call's ids: token-in against re-rendering.

    python benchmarks/extension_rate.py            the table, figures on the last line
    python benchmarks/extension_rate.py --check    exit 1 when token-in is below 100 % anywhere
    python benchmarks/extension_rate.py --json     one JSON object instead of the table

20 turns, append-only, in nine chat templates: eight manners of real ones over a byte vocabulary
(those of the tests: closes by role marker, reasoning stripped from earlier turns, two end tokens,
tools that move, a tokenizer that merges what the model sampled apart, ...), and the tiny model's,
which strips reasoning as Qwen3's does. A prompt extends when it begins with all ids, prompt and
sampled, of the call before. Token-in continues them; re-rendering renders all messages again.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/inference"))

from test_inference_styles import NUM_TURNS, STYLES, Style, converse, extension_rate
from verdict import Bar, conclude, make_parser

from rolltree.inference import ChatRenderer


def styles() -> dict[str, Style]:
    from transformers import AutoTokenizer

    from rolltree.inference.models import resolve_model

    thinking = "<think>\nAdd one.\n</think>\n\n"
    return STYLES | {
        "tiny": Style(
            AutoTokenizer.from_pretrained(resolve_model("tiny")), thinking, rewrites=True
        ),
    }


def rates(style: Style) -> tuple[float, float]:
    """Return the extension rates of token-in and of re-rendering."""
    renderer = ChatRenderer(style.tokenizer)
    calls, messages = converse(renderer, style)
    prompts = [call.prompt_ids.tolist() for call in calls if call.prompt_ids is not None]
    anew = [renderer.render(messages[: 2 * turn + 1]).tolist() for turn in range(NUM_TURNS)]
    return extension_rate(prompts, calls), extension_rate(anew, calls)


def show(found: dict[str, tuple[float, float]]) -> None:
    print(f"{'template':14} {'token-in':>9} {'re-rendering':>13}")
    for name, (token_in, anew) in found.items():
        print(f"{name:14} {token_in:9.0%} {anew:13.0%}")


def main() -> int:
    options = make_parser(__doc__).parse_args()
    began_s = time.perf_counter()
    found = {name: rates(style) for name, style in styles().items()}
    least = 100 * min(token_in for token_in, _ in found.values())
    anew = 100 * sum(rate for _, rate in found.values()) / len(found)
    names = ("token_in", "re_rendering")
    rows = {name: dict(zip(names, each, strict=True)) for name, each in found.items()}
    return conclude(
        options,
        [Bar.at_least("% of prompts extend with token-in, worst template", least, 100)],
        {"turns": NUM_TURNS, "templates": rows},
        lambda: show(found),
        also=[
            f"{anew:.0f} % re-rendered, mean of {len(found)} templates",
            f"{time.perf_counter() - began_s:.1f} s",
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
