"""axe-core finds nothing serious in any view: names, roles, contrast, order of headings."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import golden_kit
from browser_kit import Tab
from golden.pictures import PICTURES, RUNS

PLACES = [
    *(picture.address for picture in PICTURES),
    "#/run/demo/rollouts?sort=-breaks",
    "#/run/demo/rollouts?by=group",
    "#/run/tools/evaluation/eval",
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory, start):
    root = tmp_path_factory.mktemp("axe")
    for name in RUNS:
        golden_kit.unpack(RUNS[name], root / name)
    return start(root)


@pytest.fixture(scope="module")
def axe():
    """Return axe-core, which a package of PyPI brings."""
    spec = find_spec("axe_playwright_python")
    if spec is None:
        pytest.skip("the package axe-playwright-python is missing: pip install it")
    return (Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, shelf, axe, scheme):
    # axe-core itself is not a file of the page, so the page's policy would refuse it.
    tab = Tab(browser, shelf.link, scheme=scheme, bypass_csp=True)
    tab.page.evaluate(axe)
    found = {}
    for place in PLACES:
        tab.open(place)
        tab.page.wait_for_function(
            "() => document.querySelector('[aria-busy]') === null", timeout=60_000
        )
        told = tab.page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
        found[place] = [
            f"{each['impact']} {each['id']}: {each['nodes'][0]['html'][:200]}"
            for each in told["violations"]
            if each["impact"] in ("serious", "critical")
        ]
    assert {place: said for place, said in found.items() if said} == {}
    tab.page.context.close()
