"""The Python blocks of docs/harbor.md run."""

import asyncio

import pytest

import docs_kit
from rolltree.errors import SandboxUnavailable
from rolltree.sandbox import LocalBackend


def test_examples(capsys, tmp_path, monkeypatch):
    async def attempt():
        await (await LocalBackend("bubblewrap").create()).close()

    try:
        asyncio.run(attempt())
    except SandboxUnavailable as error:
        pytest.skip(f"bubblewrap does not work here: {error}")
    monkeypatch.chdir(tmp_path)
    assert len(docs_kit.blocks("harbor.md")) == 2
    docs_kit.run("harbor.md")
    assert "OracleResult(task='docs/greeting', reward=1.0, problem=None)" in capsys.readouterr().out
