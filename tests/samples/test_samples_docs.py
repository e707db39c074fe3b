"""The code in the documentation runs, and its assertions hold."""

import pytest

import docs_kit


@pytest.mark.parametrize("page", ["token-tree.md", "samples.md"])
def test_every_block_runs_in_order(page: str) -> None:
    blocks = docs_kit.blocks(page)
    assert len(blocks) >= 3
    assert sum(block.count("assert") for block in blocks) >= 8
    docs_kit.run(page)
