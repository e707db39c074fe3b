"""The Python blocks of the pages on protocols and credit run."""

import pytest

import docs_kit


@pytest.mark.parametrize(("page", "num_blocks"), [("protocols.md", 3), ("credit.md", 2)])
def test_the_page(page, num_blocks):
    assert len(docs_kit.blocks(page)) == num_blocks
    docs_kit.run(page)
