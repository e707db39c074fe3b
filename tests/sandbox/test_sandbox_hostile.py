"""What code did to its sandbox is the model's doing: never a `SandboxError` without a reward."""

import pytest
from hostile import ACTS, LIMITS, RACES, verdict

from rolltree.sandbox import LocalBackend
from rolltree.sandbox.machine import this_machine
from rolltree.values.errors import SandboxUnavailable

SAMPLE = (
    *("folder without rights", "folder replaced by a link", "folders in place of programs"),
    *("names that are not UTF-8", "2,000 nested folders", "default access list without rights"),
    "a name that is not text",
    *("the folder loses its rights", "signals to everybody beside it"),
)
"""`benchmarks/sandbox.py` plays all of them."""


@pytest.mark.parametrize("level", ["bubblewrap", "landlock", "rlimits"])
@pytest.mark.parametrize("name", SAMPLE)
async def test_what_code_did_to_its_sandbox_is_no_failure_of_the_sandbox(level, name, tmp_path):
    if level == "bubblewrap" and this_machine().bwrap is None:
        pytest.skip("bubblewrap is not installed")
    tmp_path.chmod(0o755)
    backend = LocalBackend(level, allow_weaker=True, base=tmp_path)
    try:
        sandbox = await backend.create(limits=LIMITS)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    assert await verdict(sandbox, name) == "answered"
    await sandbox.close()
    assert list(tmp_path.iterdir()) == [], "something of it is left"


def test_there_are_enough():
    assert len(ACTS) + len(RACES) >= 30
