"""What a tiny training loads: the modules of rolltree, their lines of code, and the rooms.

    python tests/house/tiny.py             a line per room, and the sum
    python tests/house/tiny.py --modules   a line per module

The training makes its model, takes two steps on the CPU with the default report, and evaluates
before and after them. It runs in a process of its own, in an empty folder.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from weigh import SRC, code_lines

TRAINING = """
import rolltree as rt

rows = [{"question": f"{a} + 1 =", "answer": str(a + 1)} for a in range(4)]
rubric = rt.Rubric([lambda completion, answer: float(answer in completion[-1]["content"])])
rt.train(
    environment=rt.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=rubric), model="tiny",
    num_steps=2, groups_per_step=2, group_size=2, sampling={"max_tokens": 4}, run_dir="runs/tiny",
)
"""
_MODULES = """
import json, sys
with open("modules.json", "w") as out:
    json.dump({
        name: module.__file__
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "rolltree" and getattr(module, "__file__", None)
    }, out)
"""


def loaded(source=SRC.parent, then=""):
    """Train with the rolltree below `source`, and return its files by module; run `then` last."""
    env = os.environ | {"PYTHONPATH": str(source)}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", TRAINING + _MODULES + then]
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, check=False, env=env
        )
        if done.returncode:
            raise AssertionError(done.stdout[-1000:] + done.stderr[-3000:])
        modules = json.loads(Path(folder, "modules.json").read_text(encoding="utf-8"))
    return {name: Path(file) for name, file in modules.items()}


def main():
    files = loaded()
    lines = {name: code_lines(path) for name, path in files.items()}
    if "--modules" in sys.argv[1:]:
        parts = Counter(lines)
    else:
        parts = Counter()
        for path in files.values():
            room, *rest = path.relative_to(SRC).parts
            parts[room if rest else "(modules)"] += code_lines(path)
    for name, number in parts.most_common():
        print(f"{number:8,} {name}")
    print(f"{sum(lines.values()):8,} in {len(files)} modules")


if __name__ == "__main__":
    main()
