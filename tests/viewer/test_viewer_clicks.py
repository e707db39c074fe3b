"""A new user's test: each planted problem is found from the front page in at most three clicks."""

import pytest

import planted_kit

SHOWN = {
    "zero_variance": ("/rollouts?", "g00"),
    "breaks": ("/tokens/", "reasoning stripped"),
    "empty_answers": ("/rollout/", "Conversation"),
    "drift": ("metric=", "trainer"),
    "timeouts": ("/rollout/", "search took longer than 5 s"),
}
"""Problem to a part of the address that the clicks lead to, and of what the page says there."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory, start):
    root = tmp_path_factory.mktemp("planted")
    for problem in planted_kit.PROBLEMS:
        planted_kit.plant(root / problem, problem)
    return start(root)


@pytest.mark.parametrize("problem", planted_kit.PROBLEMS)
def test_a_planted_problem_is_found_in_two_clicks(browser, planted, problem):
    address, said = SHOWN[problem]
    page = browser.new_page()
    page.goto(planted.link)
    page.get_by_role("link", name=problem, exact=True).click()
    sentence = page.locator(".sentence", has_text=planted_kit.PROBLEMS[problem])
    sentence.wait_for(timeout=30_000)
    sentence.get_by_role("link").first.click()
    page.wait_for_function("(part) => location.hash.includes(part)", arg=address, timeout=30_000)
    page.get_by_text(said).first.wait_for(timeout=30_000)
    page.close()
