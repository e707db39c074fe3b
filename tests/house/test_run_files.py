"""The files of a folder that somebody else may have made are opened in one way only.

`rolltree._helpers.files` opens regular files, without following links and without blocking. The
rooms below handle run folders; whatever else they open is listed with the reason.
"""

import ast

import pytest

from house.texts import SRC

ROOMS = (
    *("cli", "environments", "evaluation", "gateway", "inference", "insight", "records", "reports"),
    *("rollouts", "sandbox", "scale", "store", "training", "verifiers"),
)
METHODS = {"read_text", "read_bytes", "write_text", "write_bytes"}
ALLOWED = {
    "cli/app.py:_drop_unwritten": "/dev/null",
    "cli/app.py:_fill_closed": "/dev/null",
    "verifiers/packages.py:_name_in": "a project whose code the user installs",
    "environments/code_hashes.py:code_hashes": "an environment's own files, whose code runs",
    "environments/dataset.py:_read_jsonl": "a data set that the user names",
    "environments/project.py:_read": "an environment's own files, whose code runs",
    "environments/project.py:own_max_tokens": "an environment's own files, whose code runs",
    "environments/scaffold.py:scaffold": "new files of the user's",
    "gateway/journal.py:__init__": "a new file: O_EXCL follows no link",
    "cli/docs.py:show_page": "pages of the package",
    "inference/formats/rows.py": "a table of the package",
    "inference/models/layouts.py:_read_index": "weights that the user names",
    "inference/models/made.py:made_once": "a lock in the user's cache",
    "store/metric_table.py:metric_rows": "a file of the package",
    "scale/cluster/driver.py:_write_secret": "a descriptor of a new file: O_NOFOLLOW",
    "scale/cluster/launchers.py:marked_processes": "/proc",
    "insight/export.py:_dataset": "a temporary folder of `whole_folder`",
    "insight/export.py:_is_result": "a regular file that the user names",
    "insight/export.py:_results": "a regular file that the user names",
    "records/table.py:_names_in": "a regular file that the user names",
    "records/table.py:_write_csv": "a temporary file of `whole_file`",
    "sandbox/confine.py": "a program of its own, which has only the standard library: O_PATH",
    "sandbox/folder.py": "relative to a descriptor, without following links",
    "sandbox/forward.py": "a program of its own, which has only the standard library: /dev/null",
    "sandbox/local.py": "files of the package",
    "sandbox/machine.py": "/proc and /etc",
    "sandbox/mount.py": "/proc",
    "sandbox/process.py": "/proc, and files of the package",
    "sandbox/repl.py": "a program of its own, which has only the standard library: /dev/null",
    "sandbox/zygote.py": "a program of its own, with only the standard library: a program's file",
    "sandbox/supervisor.py": "a program of its own, with only the standard library: /proc",
    "store/export.py:write_lines": "a temporary file of `whole_file`",
    "training/config_input.py:_known_as": "a table of the package",
    "training/config_input.py:read_config": "a config that the user names",
    "insight/page/app.py:_file": "files of the package",
    "insight/page/app.py:_page": "files of the package",
    "insight/page/bundle.py:page_with": "files of the package",
    "insight/page/serve.py:_redirect_file": "a file of this process in the temporary folder",
    "insight/page/export.py:export_page": "a regular file that the user names",
}
"""Functions, or whole modules, that open files in another way, each with the reason."""


def opened_otherwise():
    """Return the functions of these rooms that open a file without `rolltree._helpers.files`."""
    found = set()
    for room in ROOMS:
        for path in sorted((SRC / room).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            _look(tree, path.relative_to(SRC).as_posix(), "", found)
    return found


def _look(node, module, function, found):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    if isinstance(node, ast.Call) and _opens(node):
        found.add(f"{module}:{function}")
    for child in ast.iter_child_nodes(node):
        _look(child, module, function, found)


def _opens(call):
    name, first = call.func, call.args[0] if call.args else None
    if isinstance(name, ast.Name) and name.id == "open":
        is_checked = isinstance(first, ast.Call) and getattr(first.func, "id", "") == "open_regular"
        return not is_checked
    if not isinstance(name, ast.Attribute):
        return False
    if name.attr == "open" and getattr(name.value, "id", "") == "os":
        return True
    # `Path.open` is told from other methods of that name by its mode, or its encoding.
    has_mode = isinstance(first, ast.Constant) and set(str(first.value)) <= set("rwabxt+")
    keywords = {each.arg for each in call.keywords}
    has_mode = has_mode or "encoding" in keywords or (first is None and "mode" in keywords)
    return name.attr in METHODS or (name.attr == "open" and has_mode)


def test_files_of_a_run_are_opened_by_the_helpers_of_files():
    found = {name for name in opened_otherwise() if name.partition(":")[0] not in ALLOWED}
    assert sorted(found - ALLOWED.keys()) == [], "use rolltree._helpers.files"


def test_every_exception_of_run_files_is_needed():
    found = opened_otherwise()
    assert sorted(ALLOWED.keys() - found - {name.partition(":")[0] for name in found}) == []


@pytest.mark.parametrize(
    ("code", "opens"),
    [
        ("os.open(path, os.O_RDONLY)", True),
        ("open(path)", True),
        ("open(open_regular(path))", False),
        ("path.open(mode='rb')", True),
        ("path.open('rb')", True),
        ("path.open(encoding='utf-8')", True),
        ("path.read_text()", True),
        ("Run.open(folder)", False),
        ("Run.open(folder, 'r')", False),
        ("Run.open(folder, mode='r')", False),
        ("read_regular(path)", False),
    ],
)
def test_ways_to_open_a_file_are_seen(code, opens):
    (statement,) = ast.parse(code).body
    assert _opens(statement.value) is opens
