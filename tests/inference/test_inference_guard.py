"""The limits on templates: honest templates do not notice them, others stop."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.ext import loopcontrols

from rolltree.inference.guard import GuardedEnvironment, LimitExceeded, Limits, guarded, weight

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


def plain() -> jinja2.Environment:
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])


@pytest.mark.parametrize("source", HONEST)
def test_honest_templates_render_as_in_plain_jinja(source: str) -> None:
    expected = plain().from_string(source).render(**VALUES)
    with guarded(Limits()):
        assert GuardedEnvironment(Limits()).from_string(source).render(**VALUES) == expected


@given(
    st.lists(st.text(max_size=20), max_size=5),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=8,
    ),
)
def test_honest_values_render_as_in_plain_jinja(texts: list[str], value: Any) -> None:
    source = (
        "{% for t in texts %}{{ loop.index ~ ':' ~ t + '!' }}{% endfor %}"
        "{{ texts | join(', ') }}{{ value }}{{ value | string | length }}"
    )
    expected = plain().from_string(source).render(texts=texts, value=value)
    with guarded(Limits()):
        environment = GuardedEnvironment(Limits())
        assert environment.from_string(source).render(texts=texts, value=value) == expected


def run(source: str, limits: Limits) -> str:
    with guarded(limits):
        return GuardedEnvironment(limits).from_string(source).render(**VALUES)


@pytest.mark.parametrize("size", [99, 100, 101])
def test_the_output_may_be_as_long_as_the_limit(size: int) -> None:
    source = f"{{% for i in range({size}) %}}x{{% endfor %}}"
    limits = Limits(num_characters=100)
    if size <= 100:
        assert run(source, limits) == "x" * size
    else:
        with pytest.raises(LimitExceeded, match="wrote over 100 characters"):
            run(source, limits)


@pytest.mark.parametrize(
    "source", ["{{ 'ab' * 51 }}", "{{ ('a' * 60) + ('b' * 60) }}", "{{ ('a' * 60) ~ ('b' * 60) }}"]
)
def test_no_value_may_be_larger(source: str) -> None:
    with pytest.raises(LimitExceeded, match="larger than 100"):
        run(source, Limits(num_characters=100))


def test_time_is_up_inside_macros_and_captured_blocks_too() -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for source in (
        loops,
        "{% macro f() %}" + loops + "{% endmacro %}{{ f() }}",
        "{% set x %}" + loops + "{% endset %}",
        "{% filter upper %}" + loops + "{% endfilter %}",
    ):
        start = perf_counter()
        with pytest.raises(LimitExceeded, match=r"longer than 0\.05 s"):
            run(source, Limits(time_s=0.05))
        assert perf_counter() - start < 1.0


def test_every_rendering_has_its_own_budget() -> None:
    limits = Limits(num_characters=10)
    for _ in range(3):
        assert run("12345678", limits) == "12345678"
    with guarded(limits):
        environment = GuardedEnvironment(limits)
        with guarded(limits):
            assert environment.from_string("12345678").render() == "12345678"
        assert environment.from_string("12345678").render() == "12345678"
        with pytest.raises(LimitExceeded):
            environment.from_string("12345678").render()


def test_threads_do_not_share_budgets() -> None:
    limits = Limits(num_characters=1000)
    environment = GuardedEnvironment(limits)
    template = environment.from_string("{% for i in range(900) %}x{% endfor %}")
    results: list[str] = []

    def render() -> None:
        with guarded(limits):
            results.append(template.render())

    threads = [threading.Thread(target=render) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["x" * 900] * 8


def test_without_a_budget_values_are_limited_all_the_same() -> None:
    environment = GuardedEnvironment(Limits(num_characters=100))
    assert environment.from_string("{{ 'ab' * 50 }}").render() == "ab" * 50
    with pytest.raises(LimitExceeded):
        environment.from_string("{{ 'ab' * 51 }}").render()


@pytest.mark.parametrize(
    "source",
    [
        "{{ items.append(4) }}",
        "{{ data.update(a=1) }}",
        "{{ data.__class__ }}{{ items.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ run.__globals__ }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
    ],
)
def test_nothing_outside_the_template_can_be_reached(source: str) -> None:
    values = {**VALUES, "items": [1], "data": {"a": 0}, "run": run}
    try:
        with guarded(Limits()):
            text = GuardedEnvironment(Limits()).from_string(source).render(**values)
    except (jinja2.TemplateError, TypeError) as error:
        text = ""
        assert str(error)  # noqa: PT017
    assert text == ""
    assert (values["items"], values["data"]) == ([1], {"a": 0})


@given(
    st.recursive(
        st.one_of(st.integers(0, 10**6), st.text(max_size=10)),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(max_size=4), inner)),
    )
)
def test_weight_bounds_the_text_from_both_sides(value: Any) -> None:
    size = len(str(value))
    estimate = weight(value, 10**9)
    assert estimate <= 2 * size + 16
    assert estimate >= size / 12  # escapes make the text longer, by a constant at most
