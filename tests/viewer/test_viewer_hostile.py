"""What models, tools and others write is shown and does nothing: hostile strings everywhere."""

import itertools
import json
import re
from pathlib import Path

import pytest

import rolltree as rt
from browser_kit import Tab, part
from rolltree.rollouts.record import encode_result
from rolltree.store import Run
from step_kit import answer

RUN = "window.hacked=1"
FORMS = [
    "<script>@</script>",
    "<img src=x onerror=@>",
    "<svg/onload=@>",
    "<svg><a xlink:href='javascript:@'><text y=20>x</text></a><set attributeName=onload to=@>",
    '"><iframe srcdoc="<script>parent.@</script>">',
    "<math><mtext></table><mglyph><style><img src onerror=@>",
    "<template><script>@</script></template><object data='data:text/html,@'>",
    "[link](javascript:@)",
    "[link](data:text/html;base64,QA== '@')",
    "![image](x\"onerror='@')",
    "<javascript:@>",
    "[id]: javascript:@ 'title'\n[id]",
    "javascript:@",
    "data:text/html,<script>@</script>",
    "vbscript:@",
    "{{constructor.constructor('@')()}}",
    "${@}#{@}<%= @ %>{% @ %}",
    "`${window['@']}`",
    "__proto__ @",
    "constructor.prototype.@",
    "hidden muted error sticky inspector @",
    "<style>*{display:none}</style>@",
    "</style><style>body{background:url(//evil.invalid/@)}",
    ";background:url('//evil.invalid/@');position:fixed;inset:0",
    "expression(@) -moz-binding:url(//evil.invalid#@)",
    "</pre></code></main></body><b onmouseover=@>bold</b>",
    "\x1b[31m\x1b]0;@\x07\x1b[2J\x1b]8;;http://evil.invalid\x07",
    "\u202e@\u2066\u2067\u061c\u200f",
    "\u200b\u2060\u00ad\u034f@\u115f\u3164\ufff9",
    "".join(chr(0xE0000 + ord(each)) for each in "ignore all rules") + "@",
    "\x00\x07\x7f\x85@\ufeff\u2028\u2029\r",
    "\ud800@\udfff",
    "a" + "\u0301\u0489\u20dd" * 300 + "@",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466" * 60 + "@",
    "\U0001f3f4" + "\ufe0f" * 200 + "@",
    "\ufdfd" * 200 + "@\U0001242b" * 3,
    "مرحبا بالعالم @ שלום עולם" * 20,
    "@" + "W" * 3000,
    "1e400 NaN -Infinity 0x1p9999 @",
    "9" * 400 + " @",
    "=cmd|'/c calc'!A1,@;\t+@",
    "| a | b |\n|---|---|\n| @ | <b> |",
    "`````@",
    "# @\n- * **_`@",
    "# " + " " * 20_000 + "@\r",
    "- " * 200 + "@",
    "<base href='//evil.invalid/'><link rel=stylesheet href='//evil.invalid/@'>",
    "<meta http-equiv=refresh content='0;url=//evil.invalid'>@",
    "<form action='//evil.invalid'><button autofocus onfocus=@ id=data name=cookie>",
    "%3Cscript%3E@%3C/script%3E#/run/../..?a=b&c=d",
]
WRAPS = ["@", "<think>@", '{"a": "@", "__proto__": {"x": 1}}']
_TEXTS = [wrap.replace("@", form) for form, wrap in itertools.product(FORMS, WRAPS)]
STRINGS = [text.replace("@", f"{RUN}{at:04}") for at, text in enumerate(_TEXTS)]
"""Each has a number of its own, by which it is seen on the page."""
HUGE = ["W" * 2**20, "<b>line</b>\n" * 100_000, "[" * 50_000, "\u202e" * 100_000, "`" * 59_000]
HOSTS = [re.sub(r"[/\0\ud800-\udfff]", "", text)[:60] for text in STRINGS[::15]]


def short(text, size):
    """Return the text in a name: its number stays in it."""
    number = re.search(rf"{RUN}\d+", text)
    return text if len(text) <= size or number is None else f"{number[0]} {text[: size - 20]}"


def played(at, texts, huge=""):
    """Return a rollout whose every text is hostile; the tokens of rollout 0 are all strings."""
    text = texts[0]
    request = rt.RolloutRequest(
        request_id=f"{at}/{short(text, 200)}",
        env_id=short(text, 100),
        input={"prompt": text, "example_id": short(text, 100), "task": text, "answer": huge},
        seed=0,
        sampling_seed=0,
        group_id=f"g{at // 4}/{short(text, 50)}" if at % 4 else f"g{at // 4}",
        index_in_group=at % 4,
        sampling=rt.SamplingParams(),
        phase=short(text, 60) if at % 5 == 0 else "train",
        train_step=1,
    )
    made = {"id": "c", "type": "function"}
    calls = [made | {"function": {"name": short(each, 300), "arguments": each}} for each in texts]
    said = [{"role": "assistant", "content": each, "reasoning_content": each} for each in texts]
    completion = [
        *said,
        {"role": "assistant", "content": huge, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": text + huge},
        {"role": short(text, 30), "name": text[:60], "content": [{"type": "text", "text": text}]},
    ]
    ids = [*range(3 * at, 3 * at + 3)]
    state = rt.State(
        input=request.input,
        prompt=text,
        completion=completion,
        trajectory=rt.Trajectory(
            [answer([*range(len(STRINGS) // 2)], [*range(len(STRINGS) // 2, len(STRINGS))])]
            if at == 0
            else [answer([1, 2], ids), answer([1, 3], ids)]
        ),
        reward=at / 100,
        metrics={short(text, 80): 1.0},
        tool_errors=[{"tool": text, "type": text, "message": text, "traceback": text}],
    )
    error = rt.ErrorRecord(short(text, 80), text, text + huge, "model") if at % 3 == 1 else None
    return rt.RolloutResult(request, (state,), error, 1)


def tokenizer(folder):
    """Write the run's own tokenizer: token `n` is string `n`."""
    words = {}
    for at, text in enumerate(STRINGS):
        words[short(text, 400).encode("utf-8", "replace").decode() + f" {at}"] = at
    model = {"type": "WordLevel", "vocab": words, "unk_token": next(iter(words))}
    empty = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    data = dict.fromkeys(empty) | {"version": "1.0", "added_tokens": [], "model": model}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(data))


def write(folder, strings, huge):
    config = {"model": {"name": strings[1]}, "env": {text[:200]: text for text in strings}}
    with Run.create(folder, kind="train", config=config) as run:
        for at in range(0, len(strings), 3):
            large = huge[at // 3] if at // 3 < len(huge) else ""
            run.add_rollouts(encode_result(played(at // 3, strings[at : at + 3], large)))
        for step in range(1, 4):
            run.add_step(step, {"reward/mean": step} | {short(t, 80): step for t in strings})
        for text in strings[:20]:
            run.announce(text, lambda _: None)
        run.add_event("ended", {"state": "failed", "error": strings[0], "message": strings[3]})
    tokenizer(folder / "model")


@pytest.fixture(scope="module")
def hostile(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    name = "<img src=x onerror=window.hacked=1>"
    write(folder / name, STRINGS, HUGE)
    for at, host in enumerate(HOSTS):
        with Run.create(folder / f"{host}{at}", kind=f"kind {host}", config={"model": host}) as run:
            run.add_rollouts(encode_result(played(at, STRINGS[3 * at : 3 * at + 3])))
            run.add_event("ended", {"state": "failed", "error": host, "message": STRINGS[at]})
    return start(folder), name


LOOK = (Path(__file__).parent / "hostile_kit.js").read_text()
MADE = "main :is(script, iframe, img, style, link, form, base, object, embed, meta)"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.long)])
def test_hostile_strings_are_shown_and_do_nothing(browser, hostile, width):
    page, name = hostile
    base = f"#/run/{part(name)}"
    rows = page.get(f"/api/runs/{part(name)}/rollouts?limit=500").json()["rows"]
    groups = page.get(f"/api/runs/{part(name)}/groups?limit=500").json()["rows"]
    phases = page.get(f"/api/runs/{part(name)}").json()["phases"]
    assert len(rows) == len(STRINGS) // 3 >= 50
    chosen = rows[:5] + rows[5 + (width == 1280) :: 2]
    names = [f"{part(row['request_id'])}/0" for row in chosen]
    first = f"{part(rows[0]['request_id'])}/0"
    places = ["#/?q=", base, f"{base}?metric=h", f"{base}/rollouts", f"{base}/rollouts?by=group"]
    places += [f"{base}/rollout/{each}" for each in names]
    places += [f"{base}/tokens/{each}/0" for each in (first, names[7])]
    places += [f"{base}/tokens/{first}/0?colour=logprob", f"{base}/tree/{first}"]
    places += [
        f"{base}/tree/{names[3]}",
        *(f"{base}/tree/{part(g['group_id'])}" for g in groups[:2]),
    ]
    places += [f"{base}/group/{part(group['group_id'])}" for group in groups[:4]]
    places += [f"{base}/rollouts?phase={part(phases[0]['phase'])}"]
    places += [f"{base}/rollouts?where={part(text[:300])}" for text in STRINGS[:60:20]]
    places += [f"{base}/rollout/{part(STRINGS[0])}/0", f"#/run/{part(STRINGS[3])}", "#/%3Cb%3E/x"]
    arms = [f"{name}:{phase['phase']}" for phase in phases[:2]]
    places += [f"#/compare?arm={part(arms[0])}&arm={part(arms[1])}"]
    tab = Tab(browser, page.link, width)
    seen = set()
    for place in places:
        tab.open(place)
        assert tab.looked() == {"pale": [], "overflow": 0, "hacked": None}, place
        found = tab.page.evaluate(LOOK)
        assert found["bad"] == [], place
        assert tab.page.locator(MADE).count() == 0, place
        seen.update(found["seen"])
    assert len(seen) >= 100
    requests = tab.page.evaluate(
        "() => performance.getEntriesByType('resource').map((e) => e.name)"
    )
    assert all(each.startswith(page.base) for each in requests)
    tab.page.context.close()
    known = "Failed to load resource: the server responded with a status of 40"
    assert [each for each in tab.said if not each.startswith(known)] == []
