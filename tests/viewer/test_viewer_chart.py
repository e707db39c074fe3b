"""Curves: which points a line joins, and where it has a band."""

import pytest

DRAWN = """async ([values, low, high, wanted]) => {
  const { board } = await import("/static/chart.js");
  const steps = values.map((_, at) => at);
  const panels = [{ title: "t", group: "", series: [{ label: "a", values, low, high }] }];
  const made = board(steps, panels, { onStep: () => {} });
  const box = document.createElement("div");
  box.append(made.element);
  if (wanted === "band") return box.querySelector("path.band") !== null;
  const line = box.querySelector("path.line").getAttribute("d");
  return wanted === "height" ? line.match(/[\\d.]+/g)[1] : line.replace(/[^ML]/g, "");
}"""


@pytest.fixture(scope="module")
def drawn(browser, page):
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(page.base)
    yield lambda values, *more: tab.evaluate(DRAWN, [values, *(more or [None] * 3)])
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


def test_a_level_line_has_no_block_around_it(drawn):
    ends = [[0, 0, 0], [0.4, 0.4, 0.4]]
    assert drawn([0.1, 0.0, 0.2], *ends, "band")
    assert not drawn([0, 0, 0], *ends, "band")
    # It stays at the bottom, where zeros are, and the axis is not that of the band.
    assert drawn([0, 0, 0], *ends, "height") == drawn([0, 0, 0], None, None, "height")
