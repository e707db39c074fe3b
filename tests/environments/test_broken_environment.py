"""Code and settings of an environment that cannot be read are named, with the line."""

import pytest
from click.testing import CliRunner

from rolltree.cli import app
from rolltree.environments import load_environment
from rolltree.environments.registry import load_object
from rolltree.training import load_train_config
from rolltree.values.errors import ConfigError

BROKEN = "import rolltree as rt\n\ndef load_environment(:\n    return 1\n"
NESTED = {
    "lists": "[env]\nargs = {a = " + "[" * 5000 + "]" * 5000 + "}\n",
    "tables": "[env]\nargs = " + "{a = " * 5000 + "1" + "}" * 5000 + "\n",
    "names": "[" + ".".join(["a"] * 5000) + "]\nb = 1\n",
    "keys": ".".join(["a"] * 5000) + " = 1\n",
}


@pytest.mark.parametrize("load", [load_environment, lambda file: load_object(f"{file}:x")])
def test_a_syntax_error_is_named_with_its_line(tmp_path, load):
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    with pytest.raises(ConfigError, match=r"broken.py:3: invalid syntax: def load_environment\(:"):
        load(str(file))


def test_a_syntax_error_in_a_module_beside_it_is_named(tmp_path):
    (tmp_path / "helps_the_environment.py").write_text("x = = 1\n")
    file = tmp_path / "fine.py"
    file.write_text("import helps_the_environment\n")
    with pytest.raises(ConfigError, match=r"helps_the_environment.py:1: .*: x = = 1"):
        load_environment(str(file))


@pytest.mark.parametrize("where", ["function", "module"])
@pytest.mark.parametrize(
    "raised", ["ValueError('no\\nrows')", "json.loads('{')", "KeyboardInterrupt()"]
)
def test_what_an_environment_raises_while_it_is_loaded_is_one_line_with_its_place(
    tmp_path, raised, where
):
    line = f"raise {raised}" if "loads" not in raised else raised
    body = f"def load_environment():\n    {line}\n"
    if where == "module":
        body = f"\n{line}\ndef load_environment(): pass\n"
    file = tmp_path / "breaks.py"
    file.write_text(f"import json\n{body}")
    shown = CliRunner().invoke(app, ["eval", str(file), "-m", "tiny"])
    (told,) = shown.output.strip().splitlines()
    assert shown.exit_code == 2
    kind = raised.partition("(")[0].replace("json.loads", "JSONDecodeError")
    assert f"raised {kind} at {file}:3 while it was loaded" in told
    with pytest.raises(ConfigError) as ended:
        load_environment(str(file))
    assert type(ended.value.__cause__).__name__ == kind


@pytest.mark.parametrize("code", [b"x = '\xff'\n", b"\0", b"(" * 500, b"  x = 1\n"])
def test_a_file_that_is_not_python_is_no_traceback(tmp_path, code):
    file = tmp_path / "odd.py"
    file.write_bytes(code)
    shown = CliRunner().invoke(app, ["eval", str(file), "-m", "tiny"])
    assert shown.exit_code == 2
    assert "error: " in shown.output
    assert "Traceback" not in shown.output


@pytest.mark.parametrize("kind", NESTED)
def test_toml_that_is_nested_too_deeply_is_refused(tmp_path, kind):
    file = tmp_path / "train.toml"
    file.write_text(NESTED[kind])
    with pytest.raises(ConfigError, match=r"train.toml is not TOML: it is nested deeper than 100"):
        load_train_config(file)


def test_a_setting_that_is_nested_too_deeply_is_taken_as_text(tmp_path):
    shown = CliRunner().invoke(app, ["train", "arithmetic", "env.args=" + "[" * 5000])
    assert shown.exit_code == 2
    assert "Traceback" not in shown.output
