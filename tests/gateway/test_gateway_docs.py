"""The Python blocks of the page on the gateway run."""

import docs_kit


def test_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(docs_kit.blocks("gateway.md")) == 2
    docs_kit.run("gateway.md")
    assert capsys.readouterr().out.startswith("2 ()\n0.500 [")
