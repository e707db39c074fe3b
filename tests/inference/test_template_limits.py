"""Work inside one operation of a template, where no interpreter could interrupt it, is killed."""

import resource
import threading
from pathlib import Path

import pytest
from inference_templates import user

from rolltree.inference import ChatTemplate
from rolltree.inference import template as template_room
from rolltree.inference.template import MEMORY_BYTES, TemplateLimitError

LIMIT_S = 0.5
GROW = (
    "{% set n = namespace(a=7, b=3) %}{% for i in range(24) %}{% set n.a = n.a * n.a %}"
    "{% set n.b = n.b * n.b %}{% endfor %}"
)
SLOW = {
    "division of large integers": GROW + "{{ n.a // n.b }}",
    "remainder of large integers": GROW + "{{ n.a % n.b }}",
    "printing a large integer": GROW + "{{ n.a }}",
    "`in` over lists": (
        "{% set l = [range(99999) | list] * 99999 %}{% for i in range(99999) %}{{ [-1] in l }}"
        "{% endfor %}"
    ),
    "sum of lists": "{{ ([[1] * 20000] * (10000 * messages | length)) | sum(start=[]) | length }}",
}
LARGE = {
    "to_bytes": "{% set b = (messages | length).to_bytes(10**9, 'big') %}{{ b | length }}",
    "a long list": "{{ ([1] * (10**9 * messages | length)) | length }}",
}


def only_for_two(source):
    """Return a template that does `source` for two messages and is honest otherwise."""
    return (
        "{% if messages | length > 1 %}" + source + "{% else %}{{ messages[0].content }}{% endif %}"
    )


def children_cpu_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("source", [*SLOW.values(), *LARGE.values()], ids=[*SLOW, *LARGE])
def test_it_is_killed_in_time_and_the_next_conversation_is_rendered(source):
    template = ChatTemplate(only_for_two(source), time_limit_s=60.0)
    honest = ChatTemplate("{{ messages[0].content }}!", time_limit_s=60.0)
    template.time_limit_s = LIMIT_S
    before_s = children_cpu_s()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateLimitError, match="stopped"):
        template.render([user("a"), user("b")])
    # What was killed has used its limit, and starting it a little more, on a busy machine some
    # seconds. Left alone, each takes minutes.
    assert children_cpu_s() - before_s < LIMIT_S + 10.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 * 1024
    template.time_limit_s = 60.0
    assert template.render([user("after")]) == "after"
    assert honest.render([user("after")]) == "after!"


def test_the_processes_have_a_memory_limit():
    ChatTemplate("{{ messages }}").render([user("one is running")])
    pids = [worker._process.pid for worker in template_room._pool._idle]
    assert pids
    for pid in pids:
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        (line,) = [line for line in limits if line.startswith("Max address space")]
        assert line.split()[3:5] == [str(MEMORY_BYTES)] * 2


def test_a_rendering_beside_a_hostile_one_is_not_disturbed():
    hostile = ChatTemplate(only_for_two(SLOW["`in` over lists"]), time_limit_s=60.0)
    hostile.time_limit_s = LIMIT_S
    honest = ChatTemplate("{{ messages[0].content }}", time_limit_s=60.0)
    killed = []

    def stuck():
        with pytest.raises(TemplateLimitError):
            hostile.render([user("a"), user("b")])
        killed.append(True)

    threads = [threading.Thread(target=stuck) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert [honest.render([user(str(i))]) for i in range(20)] == [str(i) for i in range(20)]
    for thread in threads:
        thread.join()
    assert killed == [True] * 3
