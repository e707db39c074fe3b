"""Every public name, parameter and default of verifiers 0.1.8.post2 (surface.json) is here."""

import ast
import importlib
import inspect
import json
from pathlib import Path

import pytest

from rolltree.verifiers.names import SCRIPTS

SURFACE = json.loads((Path(__file__).parent / "surface.json").read_text(encoding="utf-8"))
SIGNATURES = [
    (module, name, method, text)
    for module, names in SURFACE.items()
    for name, said in names.items()
    for method, text in (said["methods"].items() if isinstance(said, dict) else [("", said)])
]
CLASSES = [
    (module, name)
    for module, names in SURFACE.items()
    for name, said in names.items()
    if isinstance(said, dict)
]
NEEDS = {
    "envs.reasoninggym_env": "reasoning_gym",
    "envs.textarena_env": "textarena",
}


def found(module, name):
    if module in NEEDS:
        pytest.importorskip(NEEDS[module])
    path = SCRIPTS.get(module, f"rolltree.verifiers.verifiers.{module}".rstrip("."))
    return getattr(importlib.import_module(path), name)


def parameters(text):
    """The names, kinds and defaults in a parameter list, as text."""
    spec = ast.parse(f"def f({text}): pass").body[0].args
    names = [arg.arg for arg in spec.args]
    defaults = [None] * (len(names) - len(spec.defaults)) + [ast.unparse(d) for d in spec.defaults]
    return (
        dict(zip(names, defaults, strict=True)),
        {arg.arg: ast.unparse(d) for arg, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)},
        spec.kwarg is not None,
    )


@pytest.mark.parametrize(("module", "name", "method", "text"), SIGNATURES)
def test_signature(module, name, method, text):
    target = found(module, name)
    if method:
        target = getattr(target, method)
    actual = list(inspect.signature(target).parameters.values())
    if actual and actual[0].name == "self":
        actual = actual[1:]
    positional, keywords, takes_more = parameters(text)
    usable = [p for p in actual if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    assert [p.name for p in usable[: len(positional)]] == list(positional)
    for parameter in (*usable[len(positional) :], *(p for p in actual if p.kind is p.KEYWORD_ONLY)):
        if parameter.name not in keywords:
            assert parameter.default is not parameter.empty, f"{parameter} is asked for"
    for parameter in actual:
        wanted = {**positional, **keywords}.get(parameter.name, "not theirs")
        if wanted == "not theirs":
            continue
        if wanted is None and method == "init_state":
            continue  # it is called with the input alone
        if wanted is None:
            assert parameter.default is parameter.empty
        elif "lambda" in wanted:
            assert callable(parameter.default)
        elif wanted.isupper() or "DEFAULT_" in wanted:
            assert isinstance(parameter.default, str)
        else:
            value = eval(wanted, {"Path": Path})  # our own file
            assert parameter.default == value or (value in ({}, []) and not parameter.default)
    if takes_more:
        assert any(p.kind is p.VAR_KEYWORD for p in actual)


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_class(module, name):
    target, said = found(module, name), SURFACE[module][name]
    annotated = {key for base in target.__mro__ for key in vars(base).get("__annotations__", ())}
    if name != "State":  # its fields are keys of the dict
        assert set(said["fields"]) <= annotated
    base = said["base"].removeprefix("vf.")
    if base in ("Environment", "MultiTurnEnv", "SingleTurnEnv", "ToolEnv", "StatefulToolEnv"):
        assert issubclass(
            target, getattr(importlib.import_module("rolltree.verifiers.verifiers"), base)
        )


def test_the_list_is_whole():
    assert len(SIGNATURES) == 155
    assert len(CLASSES) == 35
