"""The outputs of commands that the documentation shows are what the commands print today."""

import pytest

from golden import outputs


@pytest.mark.slow
@pytest.mark.parametrize("page", outputs.pages(), ids=lambda page: page.name)
def test_outputs_are_todays(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    assert len(list(outputs.BLOCK.finditer(text))) == text.count(outputs.MARK), (
        "an output block is not a comment with the command and a fenced block right below it"
    )
    assert outputs.rewritten(text, tmp_path) == text, "`make docs` writes today's outputs"


def test_an_output_that_changed_is_renewed(tmp_path):
    text = (
        "a\n<!-- output: rolltree show runs/demo --transcripts 0 -->\n```text\nold\n```\nb\n"
        "<!-- output, exit 1: rolltree show runs/nothing -->\n```\n```\n"
    )
    found = outputs.rewritten(text, tmp_path)
    assert found.startswith(
        "a\n<!-- output: rolltree show runs/demo --transcripts 0 -->\n```text\n"
    )
    assert "eval_before" in found
    assert "old" not in found
    assert found.endswith("```\nb\n<!-- output, exit 1: rolltree show runs/nothing -->\n```\n```\n")
    with pytest.raises(AssertionError, match="not a run directory"):
        outputs.printed(f"rolltree show {tmp_path / 'nothing'}")
