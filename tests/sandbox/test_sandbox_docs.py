"""The Python blocks of docs/sandbox.md run."""

import docs_kit


def test_examples(capsys):
    assert len(docs_kit.blocks("sandbox.md")) == 2
    docs_kit.run("sandbox.md")
    assert capsys.readouterr().out.splitlines() == ["12 exit 0", "21", "False", "['python']"]
