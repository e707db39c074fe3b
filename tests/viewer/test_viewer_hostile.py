"""What models, tools and datasets write is shown and does nothing: 100 hostile strings."""

import itertools

import pytest

import rolltree as rt
from browser_kit import Tab, part
from rolltree.rollouts.record import encode_result
from rolltree.store import Run

RUN = "window.hacked=1"
FORMS = [
    "<script>@</script>",
    "<img src=x onerror=@>",
    "<svg/onload=@>",
    '"><iframe srcdoc="<script>parent.@</script>">',
    "[link](javascript:@)",
    "![image](x\"onerror='@')",
    "javascript:@",
    "{{constructor.constructor('@')()}}",
    "<style>*{display:none}</style>",
    "</pre></code><b onmouseover=@>bold</b>",
    "\x1b[31m\x1b]0;@\x07\x1b[2J",
    "\u202e@\u2066\u2067\u061c\u200f",
    "\x00\x07\x7f\x85@\ufeff\u2028\u2029",
    "\ud800@\udfff",
    "`````@",
    "# @\n- * **_`@",
    "<base href='//evil.invalid/'><link rel=stylesheet href='//evil.invalid/@'>",
    "<meta http-equiv=refresh content='0;url=//evil.invalid'>@",
    "<form action='//evil.invalid'><button autofocus onfocus=@>",
    "%3Cscript%3E@%3C/script%3E#/run/../..?a=b&c=d",
]
WRAPS = ["@", "<think>@", '{"a": "@"}', "@ " * 40, "@" + "W" * 30_000]
STRINGS = [w.replace("@", f.replace("@", RUN)) for f, w in itertools.product(FORMS, WRAPS)]


def played(at, text):
    request = rt.RolloutRequest(
        request_id=f"{at}/{text[:200]}",
        env_id=text[:100],
        input={"prompt": text, "example_id": text[:100], "task": text[:100], "answer": text},
        seed=0,
        sampling_seed=0,
        group_id=f"g{at // 4}/{text[:50]}" if at % 4 else f"g{at // 4}",
        index_in_group=at % 4,
        sampling=rt.SamplingParams(),
        phase="train",
        train_step=1,
    )
    call = {"id": "c", "type": "function", "function": {"name": text[:300], "arguments": text}}
    completion = [
        {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": text},
        {"role": text[:30], "name": text[:60], "content": [{"type": "text", "text": text}]},
    ]
    state = rt.State(
        input=request.input,
        prompt=text,
        completion=completion,
        trajectory=rt.Trajectory(),
        reward=at / 100,
    )
    error = rt.ErrorRecord(text[:80], text, text, "model") if at % 3 == 0 else None
    return rt.RolloutResult(request, (state,), error, 1)


@pytest.fixture(scope="module")
def hostile(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=alert(1)>"
    with Run.create(folder, kind="train", config={"model": STRINGS[0]}) as run:
        for at, text in enumerate(STRINGS):
            run.add_rollouts(encode_result(played(at, text)))
    return start(folder.parent), folder.name


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_strings_are_shown_and_do_nothing(browser, hostile, width):
    page, name = hostile
    rows = page.get(f"/api/runs/{part(name)}/rollouts?limit=500").json()["rows"]
    assert len(rows) == len(STRINGS) == 100
    tab = Tab(browser, page.link, width)
    base = f"#/run/{part(name)}"
    places = ["#/?q=", base, f"{base}/rollouts", f"{base}/rollouts?by=group"]
    places += [f"{base}/rollout/{part(row['request_id'])}/0" for row in rows[width == 1280 :: 2]]
    places += [f"{base}/group/{part(row['group_id'])}" for row in rows[:4]]
    for place in places:
        tab.open(place)
        assert tab.looked() == {"pale": [], "overflow": 0, "hacked": None}, place
        assert (
            tab.page.locator("main :is(script, iframe, img, style, link, form, base)").count() == 0
        )
    requests = tab.page.evaluate(
        "() => performance.getEntriesByType('resource').map((e) => e.name)"
    )
    assert all(each.startswith(page.base) for each in requests)
    tab.page.context.close()
    assert tab.said == []
