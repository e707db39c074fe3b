"""The page becomes one file: modules are joined, data is escaped, and the policy names both."""

import base64
import hashlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.insight.page.bundle import STATIC, escaped, join_modules, page_with
from rolltree.insight.page.export import common_prefix_len, packed
from rolltree.records.values import json_bytes

SOURCES = {
    "main.js": 'import { add, LIMIT as most } from "./sums.js";\n'
    'import * as all from "./sums.js";\n'
    "globalThis.found = [add(1, most), all.twice(4), new all.Box().size];\n",
    "sums.js": 'import {\n  one,\n} from "./one.js";\n\nconst add_ = (a, b) => a + b + one();\n'
    "export function add(a, b) {\n  return add_(a, b);\n}\nexport const LIMIT = 10;\n"
    "export const twice = (n) => 2 * n;\nexport class Box { size = LIMIT; }\n",
    "one.js": "// export what is imported\nexport async function never() {}\n"
    "export function one() { return 1; }\n",
    "unused.js": "throw new Error();\n",
}


def test_joined_modules_do_what_the_modules_did(browser):
    page = browser.new_page()
    page.evaluate(join_modules(SOURCES, "main.js"))
    assert page.evaluate("found") == [12, 8, 10]
    page.close()


def test_a_module_is_joined_once_and_behind_what_it_imports():
    script = join_modules(SOURCES, "main.js")
    names = re.findall(r"^const (module_\w+) = \(\(\)", script, re.MULTILINE)
    assert names == ["module_one_js", "module_sums_js", "module_main_js"]
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('import { a } from "./main.js";', "each other: main.js > main.js"),
        ('import { a } from "./none.js";', "main.js imports none.js: no such file"),
        ('import a from "./sums.js";', "cannot be joined"),
        ('import "./sums.js";', "cannot be joined"),
        ('import { a } from "https://evil.invalid/a.js";', "cannot be joined"),
        ("export default 3;", "cannot be joined"),
        ("export let a = 3;", "cannot be joined"),
        ('export * from "./sums.js";', "cannot be joined"),
        ('const a = import("./sums.js");', "cannot be joined"),
        ("const a = import.meta.url;", "cannot be joined"),
    ],
)
def test_what_cannot_be_joined_is_an_error(source, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        join_modules({**SOURCES, "main.js": source + "\n"}, "main.js")


TEXTS = st.text() | st.sampled_from(["</script>", "<!--", "<script", "]]>", "\u2028", "&lt;", "\0"])


@given(
    st.recursive(TEXTS, lambda each: st.lists(each) | st.dictionaries(TEXTS, each), max_leaves=6)
)
def test_escaped_data_has_the_same_values_and_no_tags(value):
    text = escaped(json_bytes(value))
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028\u2029")


def unpacked(column, before):
    found = []
    for each in column:
        if not isinstance(each, dict):
            found.append(each)
        elif "same" in each:
            found += before[: each["same"]]
        else:
            found += [each["value"]] * each["times"]
    return found


VALUES = st.lists(st.sampled_from([None, 1, 2.5, "a"]), max_size=40)


@given(VALUES, VALUES, VALUES)
def test_a_packed_column_is_the_column(shared, first, second):
    column, before = shared + first, shared + second
    assert unpacked(packed(column, before), before) == column
    assert common_prefix_len(column, before) >= len(shared)


def test_a_context_that_grows_is_packed_once():
    before = list(range(1000))
    assert packed([*before, 1, 2], before) == [{"same": 1000}, 1, 2]
    assert packed([None] * 1000) == [{"value": None, "times": 1000}]
    assert packed(None, before) is None


def test_the_policy_names_the_script_and_the_style_and_nothing_else():
    page = page_with(b'{"a": "</script><script>x"}')
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    rules = dict(each.split(" ", 1) for each in policy.split("; "))
    for tag, rule in (("script type=.module.", "script-src"), ("style", "style-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag.split()[0]}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert page.count("<script") == 2
    assert "static/" not in re.sub(r"<script type=.module.>.*?</script>", "", page, flags=re.DOTALL)
    for path in STATIC.glob("*.js"):  # every module is in it
        assert path.read_text().splitlines()[0] in page
