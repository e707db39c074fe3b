"""In a notebook: calls inside a running event loop, results that are awaited, and rich tables."""

import asyncio

import pytest

import rolltree as rt
from docs_kit import blocks
from rolltree._helpers.html_view import MOST_ROWS, html_table
from rolltree.evaluation import build_report
from rolltree.store import Run
from rolltree.testing import ScriptedClient

HOSTILE = "<script>alert(1)</script>\x1b[31m"


def environment():
    return rt.SingleTurnEnv(
        dataset=[{"question": "1 + 1 =", "answer": "2"}] * 2,
        rubric=rt.Rubric([rt.run_inline(correct)]),
        env_id=HOSTILE,
    )


def correct(completion, answer):
    return float(completion[-1]["content"] == answer)


def evaluated():
    return rt.evaluate(environment(), ScriptedClient(["2"]), split="train")


def test_asyncio_run_takes_what_evaluate_returns():
    report = asyncio.run(evaluated())
    assert report.reward.mean == 1.0


async def test_evaluate_in_a_running_loop_is_done_and_can_be_awaited():
    report = evaluated()
    assert report.reward.mean == 1.0
    assert await report is report
    assert await asyncio.create_task(report) is report
    assert await asyncio.wait_for(report, timeout=5) is report
    cancelled = asyncio.create_task(report)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    again = await rt.evaluate_async(environment(), ScriptedClient(["2"]), split="train")
    assert again.reward == report.reward


async def test_generate_sync_in_a_running_loop():
    env = environment()
    results = env.generate_sync(env.dataset[:1], client=ScriptedClient(["2"]))
    assert (await results).reward == [1.0]
    assert "<td>1.0</td>" in results._repr_html_()


def test_what_models_and_environments_wrote_is_no_markup():
    report = evaluated()
    for shown in (report._repr_html_(), html_table(HOSTILE, [HOSTILE], [[HOSTILE]])):
        assert "<script>" not in shown
        assert "&lt;script&gt;" in shown
        assert "\x1b" not in shown
    assert "next: " in report._repr_html_()


def test_a_long_table_says_how_long_it_is():
    shown = html_table("", ["n"], [[n] for n in range(MOST_ROWS + 1)])
    assert f"<td>{MOST_ROWS - 1}</td>" in shown
    assert f"<td>{MOST_ROWS}</td>" not in shown
    assert f"the first {MOST_ROWS} of {MOST_ROWS + 1} rows" in shown


def test_tables_and_trees_of_a_run_are_shown(tmp_path):
    with Run.create(tmp_path / "run") as run:
        rt.evaluate(environment(), ScriptedClient(["2"]), split="train", run=run)
        report = build_report(run.rollouts(), env_id="e")
    with rt.read_run(tmp_path / "run") as data:
        assert "2 rollouts" in report._repr_html_()
        assert "<th>request_id</th>" in data.table("rollouts")._repr_html_()
    assert "checked" in rt.audit(tmp_path / "run")._repr_html_()
    tree = rt.TokenTree()
    tree.insert([1, 2], [3], logprobs=[-0.5])
    assert "1 calls, 3 tokens stored" in tree._repr_html_()


@pytest.mark.long
def test_the_readme_runs_in_a_notebook(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook()
    sources = [*blocks("README.md"), "before", "report", "await rt.evaluate(env, client)"]
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    kernel = nbclient.NotebookClient(
        notebook,
        timeout=500,
        resources={"metadata": {"path": str(tmp_path)}},
        kernel_name="python3",
    )
    kernel.execute()
    shown = [output for cell in notebook.cells[-3:] for output in cell.outputs]
    assert ["text/html" in output.get("data", {}) for output in shown] == [True] * 3, shown
