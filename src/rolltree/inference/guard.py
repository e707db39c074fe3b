"""Limits for chat templates, which are programs that came with somebody's weights.

Three limits per rendering: time, characters of output, and the size of any one value. The template
is compiled with a check in every loop and macro body, around every piece of output and around every
operation that can make a value grow, so an endless loop or a gigabyte of output stops with an error
in the rendering thread. It knows nothing about messages. It leaves out processor time spent inside
one filter: values are kept so small that none takes long.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class LimitExceeded(jinja2.TemplateError):
    """The template ran too long or made something too large."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may use."""

    time_s: float = 2.0
    num_characters: int = 8_000_000  # of output, and of any one value


@dataclass(slots=True)
class _Budget:
    deadline: float
    num_characters_left: int


_BUDGET: ContextVar[_Budget | None] = ContextVar("rolltree_template_budget", default=None)


@contextmanager
def guarded(limits: Limits) -> Iterator[None]:
    """Give the renderings of this block one budget."""
    token = _BUDGET.set(_Budget(perf_counter() + limits.time_s, limits.num_characters))
    try:
        yield
    finally:
        _BUDGET.reset(token)


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks assistant text for trainers; prints it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the block's body in place of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the limits above, set up as chat templates expect."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, limits: Limits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            optimized=False,  # folding constants would compute them outside the limits
        )
        del self.globals["lipsum"]
        self.limits = limits
        for name in list(self.filters):
            self.filters[name] = self._guard_filter(name, self.filters[name])

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Register a filter under the same limits as the built-in ones."""
        self.filters[name] = self._guard_filter(name, function)

    def rolltree_tick(self) -> str:
        """Stop the rendering when its time is over."""
        budget = _BUDGET.get()
        if budget is not None and perf_counter() > budget.deadline:
            raise LimitExceeded(f"it ran longer than {self.limits.time_s:g} s")
        return ""

    def rolltree_emit(self, value: Any) -> str:
        """Count one piece of output."""
        if not isinstance(value, str):
            self._check(weight(value, self.limits.num_characters))
        text = str(value)
        budget = _BUDGET.get()
        if budget is not None:
            budget.num_characters_left -= len(text)
            if budget.num_characters_left < 0:
                raise LimitExceeded(f"it wrote over {self.limits.num_characters} characters")
        return text

    def rolltree_concat(self, *values: Any) -> str:
        """Join the operands of `~`."""
        self._check(sum(weight(value, self.limits.num_characters) for value in values))
        return "".join(map(str, values))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse arithmetic whose result would be too large."""
        limit = self.limits.num_characters
        if operator == "+":
            if not (isinstance(left, int | float) and isinstance(right, int | float)):
                self._check(weight(left, limit) + weight(right, limit))
        elif operator == "%":
            self._check_format(left)
        else:
            self._check(_product(operator, left, right, limit))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Hand out `str.format` only for patterns that cannot make long text."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            self._check_format(value.__self__)
        return wrapped

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call what the sandbox allows, with arguments that cannot make large values."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            __self._check_arguments(__obj.__name__, owner, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _check(self, size: int) -> None:
        if size > self.limits.num_characters:
            raise LimitExceeded(f"it made a value larger than {self.limits.num_characters}")

    def _check_format(self, pattern: Any) -> None:
        if isinstance(pattern, str) and _WIDE.search(pattern):
            raise LimitExceeded("it formats text to a width that is not a small number")

    def _check_arguments(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if name in ("format", "format_map"):
            self._check_format(value)
        limit = self.limits.num_characters
        size = weight(value, limit)
        factor = 1
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, int) and not isinstance(argument, bool):
                factor = max(factor, abs(argument))
            elif isinstance(argument, str):
                factor = max(factor, len(argument))
            else:
                size += weight(argument, limit)
        if name in _GROWING:
            size *= factor
        self._check(size)

    def _guard_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if name in _CHEAP:
            return function
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def guard(*args: Any, **kwargs: Any) -> Any:
            self._check_arguments(name, args[skip], args[skip + 1 :], kwargs)
            return function(*args, **kwargs)

        return guard

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _instrument(tree, self)


_CHEAP = frozenset(
    ("length", "count", "first", "last", "default", "d", "int", "float", "bool", "abs", "round")
)
_GROWING = frozenset(
    (
        "batch",
        "center",
        "expandtabs",
        "format",
        "indent",
        "join",
        "ljust",
        "replace",
        "rjust",
        "slice",
        "tojson",
        "translate",
        "urlize",
        "wordwrap",
        "xmlattr",
        "zfill",
    )
)
_WIDE = re.compile(r"\d{6}|%[^a-z]*\*|\{[^{}]*:[^{}]*\{")
"""Format patterns with a width of six digits or one that is an argument."""


def weight(value: Any, limit: int, depth: int = 0) -> int:
    """Return roughly how many characters `str(value)` has, at most a little over `limit`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 3
    if depth > 50:
        return limit + 1
    if isinstance(value, Mapping):
        items: Any = (part for pair in value.items() for part in pair)
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    else:
        return 16
    total = 2
    for item in items:
        total += 2 + weight(item, limit, depth + 1)
        if total > limit:
            break
    return total


def _product(operator: str, left: Any, right: Any, limit: int) -> int:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length()
        return bits + right.bit_length()
    if operator == "**" or not (isinstance(left, int) or isinstance(right, int)):
        return 0
    times, value = (left, right) if isinstance(left, int) else (right, left)
    return max(times, 0) * weight(value, limit)


def _call(method: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


def _instrument(tree: nodes.Template, environment: jinja2.Environment) -> nodes.Template:
    """Put a check into every loop, macro, piece of output and concatenation of the template."""
    bodies: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *tree.find_all(nodes.For),
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
    ]
    for block in bodies:
        block.body.insert(0, nodes.ExprStmt(_call("rolltree_tick", []), lineno=block.lineno))
    for output in list(tree.find_all(nodes.Output)):
        output.nodes = [_measured(node) for node in output.nodes]
    _replace_concat(tree)
    tree.set_environment(environment)
    return tree


def _measured(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.TemplateData):
        node = nodes.Const(node.data, lineno=node.lineno)
    return _call("rolltree_emit", [node])


def _replace_concat(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(node, field, _call("rolltree_concat", value.nodes))
        elif isinstance(value, list):
            setattr(
                node,
                field,
                [
                    _call("rolltree_concat", item.nodes) if isinstance(item, nodes.Concat) else item
                    for item in value
                ],
            )
    for child in node.iter_child_nodes():
        _replace_concat(child)
