"""Markdown of the page: what it makes of a text, and that no text takes it long."""

import pytest

BOUND_MS = 5000
ASK = """async (text) => {
  const { markdown } = await import("/static/markdown.js");
  const box = document.createElement("div");
  const begin = performance.now();
  const blocks = markdown(text);
  const time = performance.now() - begin;
  box.append(...(blocks ?? []));
  return [box.innerHTML, time];
}"""


@pytest.fixture(scope="module")
def asked(browser, page):
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(page.base)
    yield lambda text: tab.evaluate(ASK, text)
    context.close()


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("# Title", '<p class="heading">Title</p>'),
        ("#\tTitle", '<p class="heading">Title</p>'),
        ("#nothing", '<p class="text">#nothing</p>'),
        ("a `b` c", '<p class="text">a <code>b</code> c</p>'),
        ("``a``", '<p class="text"><code>a</code></p>'),
        ("`a", '<p class="text">`a</p>'),
        ("`a``", '<p class="text">`a``</p>'),
        ("**a** *b*", '<p class="text"><strong>a</strong> <em>b</em></p>'),
        ("```py\n<b>\n```", "<pre>&lt;b&gt;</pre>"),
        ("[a](javascript:b)", '<p class="text">[a](javascript:b)</p>'),
        ("<b>a</b>", '<p class="text">&lt;b&gt;a&lt;/b&gt;</p>'),
        ("a\u202eb", '<p class="text">a⟨U+202E⟩b</p>'),
        ("e" + "\u0301" * 9, f'<p class="text">e{"́" * 6}⟨3 more marks⟩</p>'),
    ],
)
def test_what_a_text_becomes(asked, text, made):
    assert asked(text)[0] == made


@pytest.mark.parametrize(
    "text",
    [
        "# " + " " * 58_000 + "a\rb",
        "- " + " " * 58_000 + "a\rb",
        " " * 58_000 + "\ra",
        "1" * 58_000,
        "a" + "`" * 58_000,
        "a" + "`a" * 29_000,
        "".join("`" * (at % 300) + "a" for at in range(380)),
        "a" + "*" * 58_000,
        "~" * 29_000 + "\n" + "~~~\n" * 7_000,
        "\n" * 58_000,
        "a" + "\u0301" * 58_000,
    ],
    ids=range(11),
)
def test_no_text_takes_long(asked, text):
    """A reader that backtracks takes ten seconds for these, not milliseconds."""
    assert any(asked(text)[1] < BOUND_MS for _ in range(3))
