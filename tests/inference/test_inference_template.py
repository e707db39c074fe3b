from __future__ import annotations

import resource
from datetime import datetime
from time import perf_counter

import pytest
from inference_templates import PARTS, TEXT_ARGUMENTS, assistant, user

from rolltree.errors import UnsupportedSetting
from rolltree.inference import ChatRenderer, ChatTemplate, TemplateError
from rolltree.inference.guard import Limits, weight
from rolltree.testing import ByteTokenizer


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
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_are_stopped(source: str) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = perf_counter()
    with pytest.raises(TemplateError):
        ChatTemplate(source, limits=Limits(time_s=0.3)).render([user("hi")])
    assert perf_counter() - start < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 128 * 1024


def test_a_hostile_template_costs_its_time_limit_once() -> None:
    start = perf_counter()
    with pytest.raises(TemplateError, match="stopped"):
        ChatRenderer(ByteTokenizer(HOSTILE["endless loop"]))
    assert perf_counter() - start < 2.5


def test_long_but_honest_conversations_are_rendered() -> None:
    source = "{% for m in messages %}{{ m.role + ': ' ~ m.content }}{% endfor %}"
    messages = [user("x" * 1000), assistant("y" * 1000)] * 1000
    assert len(ChatTemplate(source).render(messages)) == 1000 * (2000 + len("user: assistant: "))


def test_weight_is_about_the_length_of_the_text() -> None:
    assert weight("abc", 100) == 3
    assert weight({"a": [1, 2]}, 100) >= len("{'a': [1, 2]}") - 8
    assert weight(["x" * 60] * 1000, 100) < 300
    loop: list[object] = []
    loop.append(loop)
    assert weight(loop, 100) > 100
