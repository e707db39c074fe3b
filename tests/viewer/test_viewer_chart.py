"""Curves: which points a line joins."""

import pytest

DRAWN = """async (values) => {
  const { board } = await import("/static/chart.js");
  const steps = values.map((_, at) => at);
  const panels = [{ title: "t", group: "", series: [{ label: "a", values }] }];
  const made = board(steps, panels, { onStep: () => {} });
  const box = document.createElement("div");
  box.append(made.element);
  return box.querySelector("path.line").getAttribute("d").replace(/[^ML]/g, "");
}"""


@pytest.fixture(scope="module")
def drawn(browser, page):
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(page.base)
    yield lambda values: tab.evaluate(DRAWN, values)
    context.close()


@pytest.mark.parametrize(
    ("values", "commands"),
    [
        ([1, 2, 3], "MLL"),
        ([1, None, 2, None, 3], "MLL"),  # eval.every = 2: evaluations are joined
        ([1, None, None, None, 2], "ML"),
        ([1, 2, None, 3, 4], "MLML"),  # a step without a value interrupts a curve of steps
    ],
)
def test_a_line_joins_what_is_measured_at_every_so_many_steps(drawn, values, commands):
    assert drawn(values) == commands
