from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from time import perf_counter
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inference_templates import PARTS, TEXT_ARGUMENTS, assistant, user
from jinja2.ext import loopcontrols

from rolltree.inference import ChatRenderer, ChatTemplate, TemplateError
from rolltree.testing import ByteTokenizer
from rolltree.values.errors import UnsupportedSetting


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, variables).render([user("hi")])


def test_globals_filters_and_tags_of_model_folders() -> None:
    source = (
        "{{ strftime_now('%Y') }} {{ messages | tojson }} {{ bos_token }}\n"
        "{% generation %}x{% endgeneration %}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    text = render(source, bos_token="<s>")
    year = datetime.now().year
    assert text == f'{year} [{{"role": "user", "content": "hi"}}] <s>\nx01'


def test_tojson_keeps_unicode_and_html_as_they_are() -> None:
    assert render("{{ 'é<&>' | tojson }}") == '"é<&>"'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": 2\n}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}") == '{"a": 2, "b": 1}'


def test_blocks_are_trimmed_as_in_transformers() -> None:
    assert render("a\n    {% if true %}\nb\n    {% endif %}\nc") == "a\nb\nc"


def test_raise_exception_carries_the_templates_words() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_does_not_compile_names_the_line() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("ok\n{% if %}")


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"
    with pytest.raises(UnsupportedSetting, match="image_url"):
        template.render([{"role": "user", "content": [{"type": "image_url"}]}])


def test_missing_content_is_empty() -> None:
    template = ChatTemplate("[{{ messages[0].content }}]")
    assert template.render([{"role": "assistant", "content": None}]) == "[]"


def test_templates_that_want_parts_get_parts() -> None:
    template = ChatTemplate(PARTS)
    assert template.render([user("hi")], add_generation_prompt=False) == (
        "<|im_start|>user\nhi<|im_end|>\n"
    )


def call_message(arguments: object) -> dict[str, object]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_tool_arguments_reach_templates_in_the_form_they_take(arguments: object) -> None:
    message = call_message(arguments)
    as_mapping = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert ChatTemplate(as_mapping).render([message]) == '{"a": 1}'
    text = ChatTemplate(TEXT_ARGUMENTS).render([message])
    assert '<tool_call>f {"a": 1}</tool_call>' in text
    assert message == call_message(arguments)


def test_arguments_that_are_no_json_stay_text() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert ChatTemplate(source).render([call_message("{oops")]) == "{oops"


def test_messages_cannot_be_changed_by_a_template() -> None:
    messages = [user("hi")]
    with pytest.raises(TemplateError, match="unsafe"):
        ChatTemplate("{{ messages.append(1) }}").render(messages)
    assert messages == [user("hi")]


# Templates are programs: honest ones render as in plain Jinja, hostile ones are stopped


HONEST = [
    "plain text\n  with lines\n",
    "{{ 1 + 2 * 3 - 4 }} {{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 10 }} {{ -5 }} {{ 1.5 + 2 }}",
    "{{ 'a' + 'b' }}{{ 'a' ~ 1 ~ none ~ true }}{{ 'ab' * 3 }}{{ 3 * 'ab' }}",
    "{{ 'x%sy%d' % ('a', 3) }} {{ '%s' % 'b' }} {{ '%5.2f' | format(3.14159) }}",
    "{{ '{} {name} {0!r}'.format(1, name='n') if false else 'x' }}",
    "{{ '{}-{name:>4}'.format(1, name='n') }}",
    "{% for i in range(5) %}{{ loop.index }}{% if not loop.last %},{% endif %}{% endfor %}",
    "{% for i in range(9) if i is even %}{{ i }}{% else %}none{% endfor %}",
    "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
    "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in items %}{% set ns.n = ns.n + m %}{% endfor %}"
    "{{ ns.n }}",
    "{% macro f(x, y='d') %}<{{ x }}|{{ y }}>{% endmacro %}{{ f(1) }}{{ f(2, y=3) }}",
    "{% macro wrap() %}[{{ caller() }}]{% endmacro %}{% call wrap() %}in{% endcall %}",
    "{% set block %}captured {{ items }}{% endset %}{{ block | upper }}",
    "{% filter upper %}loud {{ items[0] }}{% endfilter %}",
    "{{ items | join('-') }} {{ items | length }} {{ items | first }} {{ items | last }}",
    "{{ words | map('upper') | list }} {{ words | map(attribute='0') | join }}",
    "{{ words | select('equalto', 'b') | list }} {{ words | reject('equalto', 'b') | list }}",
    "{{ ' trim ' | trim }}|{{ ' x '.strip() }}|{{ 'a-b-c'.split('-') }}|{{ 'abc'[1:] }}",
    "{{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }}",
    "{{ 'abc' | replace('b', 'xx') }} {{ 'abc'.replace('b', 'xx') }} {{ 'ab'.center(6) }}|",
    "{{ 'a\nb' | indent(2) }} {{ 'word wrap' | wordwrap(4) }}",
    "{{ data.name }} {{ data['name'] }} {{ data.missing is defined }} {{ data.items() | list }}",
    "{% for key, value in data.items() %}{{ key }}={{ value }};{% endfor %}",
    "{{ data | dictsort }} {{ items | sort(reverse=true) }} {{ items | sum }} {{ items | max }}",
    "{{ items is iterable }} {{ 'a' is string }} {{ data is mapping }} {{ 3 in items }}",
    "{{ (items + [4, 5]) | length }} {{ [1, [2, 'x']] }} {{ {'k': [1]} }} {{ (1, 2) }}",
    "{{ items[::-1] }} {{ 'yes' if items else 'no' }} {{ missing | default('d') }}",
    "{{ none }}{{ true }}{{ missing }}{{ '' }}",
    "{% if data.name == 'n' and not missing %}and{% elif items %}or{% else %}neither{% endif %}",
    "{# a comment #}{% raw %}{{ raw }}{% endraw %}",
]
VALUES: dict[str, Any] = {
    "items": [3, 1, 2],
    "words": ["a", "b"],
    "data": {"name": "n", "other": 2},
}


def in_plain_jinja(source: str, values: dict[str, Any]) -> str:
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    return plain.from_string(source).render(**values)


@pytest.mark.parametrize("source", HONEST)
def test_honest_templates_render_as_in_plain_jinja(source: str) -> None:
    assert ChatTemplate(source, VALUES).render([]) == in_plain_jinja(source, VALUES)


_TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates too


@given(
    st.lists(_TEXTS, max_size=5),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _TEXTS),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)
        ),
        max_leaves=8,
    ),
)
def test_values_reach_the_worker_unchanged(texts: list[str], value: Any) -> None:
    source = (
        "{% for t in texts %}{{ loop.index ~ ':' ~ t + '!' }}{% endfor %}"
        "{{ texts | join(', ') }}{{ value }}{{ value | string | length }}"
    )
    values = {"texts": texts, "value": value}
    assert ChatTemplate(source, values).render([]) == in_plain_jinja(source, values)


@pytest.mark.parametrize(
    "source",
    [
        "{{ data.update(a=1) }}",
        "{{ data.__class__ }}{{ items.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__code__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
    ],
)
def test_nothing_outside_the_template_can_be_reached(source: str) -> None:
    try:
        text = ChatTemplate(source, VALUES).render([])
    except TemplateError as error:
        text = ""
        assert str(error)  # noqa: PT017
    assert text == ""


HOSTILE = {
    "endless loop": (
        "{% for i in range(99999) %}{% for i in range(99999) %}{% for i in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}"
    ),
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling with ~": (
        "{% set n = namespace(s='aaaa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}{{ n.s }}"
    ),
    "doubling with +": (
        "{% set n = namespace(s='aaaa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}{{ n.s }}"
    ),
    "doubling lists": (
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}"
    ),
    "multiplication": "{{ 'a' * 10**9 }}",
    "a list of large strings": "{{ [('a' * 1000000)] * 1000 }}",
    "joined": "{{ ([('a' * 1000000)] * 1000) | join }}",
    "centered": "{{ 'a' | center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "str.format": "{{ '{:>1000000000}'.format(1) }}",
    "str.format nested": "{{ '{:>{w}}'.format(1, w=1000000000) }}",
    "replace": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "powers": "{{ 9 ** 99999999 }}",
    "much output": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "captured output": (
        "{% set x %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}"
    ),
    "constant output in a loop": "{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}",
    "map": "{{ [1] | map('center', 1000000000) | list }}",
    "lorem ipsum": "{{ lipsum(100000000) }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "division of large integers": (
        "{% set n = namespace(a=7, b=3) %}{% for i in range(23) %}{% set n.a = n.a * n.a %}"
        "{% set n.b = n.b * n.b %}{% endfor %}{{ n.a // n.b }}"
    ),
    "`in` over lists": (
        "{% set l = [range(99999) | list] * 99999 %}{% for i in range(99999) %}{{ [-1] in l }}"
        "{% endfor %}"
    ),
    "sum of lists": "{{ ([[1] * 100000] * 10000) | sum(start=[]) | length }}",
    "to_bytes": "{% set b = (1).to_bytes(10**9, 'big') %}{{ b | length }}",
    "only a long conversation": (
        "{% if messages | length > 1 %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}"
    ),
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_are_stopped(source: str) -> None:
    ChatTemplate("a worker is running")
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = perf_counter()
    with pytest.raises(TemplateError):
        ChatTemplate(source, time_limit_s=0.3).render([user("hi"), user("again")])
    assert perf_counter() - start < 20.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 128 * 1024


def test_a_hostile_template_costs_its_time_limit_once() -> None:
    ChatTemplate("a worker is running")
    before = cpu_of_ended_children()
    with pytest.raises(TemplateError, match="stopped"):
        ChatRenderer(ByteTokenizer(HOSTILE["endless loop"]))
    assert cpu_of_ended_children() - before < 4.0  # the limit is 2 s


def cpu_of_ended_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_long_but_honest_conversations_are_rendered() -> None:
    source = "{% for m in messages %}{{ m.role + ': ' ~ m.content }}{% endfor %}"
    messages = [user("x" * 1000), assistant("y" * 1000)] * 1000
    assert len(ChatTemplate(source).render(messages)) == 1000 * (2000 + len("user: assistant: "))


def test_a_value_that_json_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(TemplateError, match="values that JSON can hold"):
        ChatTemplate("{{ x }}", {"x": object()}).render([])


def test_threads_render_side_by_side() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: template.render([user(str(n))] * 50), range(100)))
    assert texts == [str(n) * 50 for n in range(100)]
