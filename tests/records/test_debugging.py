"""The tests of the debugger, in a fresh interpreter, as a person runs it.

In a process with dozens of threads and torch, CPython 3.11 has been seen to spin in its evaluation
loop when a frame is traced there.
"""

import subprocess
import sys
from pathlib import Path


def test_the_debugger():
    scenes = Path(__file__).parent / "debugging_scenes.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(scenes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(".....")
