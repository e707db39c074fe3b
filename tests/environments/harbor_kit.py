"""Ten small Harbor tasks, each with its oracle solution and a wrong one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

CHECK = """#!/bin/bash
mkdir -p /logs/verifier
if python3 /tests/check.py; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""


@dataclass(frozen=True)
class Made:
    instruction: str
    solve: str
    wrong: str
    # Python that ends with an exception if the task is not done.
    check: str
    files: dict[str, str] = field(default_factory=dict)
    test: str = CHECK
    toml: str = ""


READ = "from pathlib import Path\n"
TASKS = {
    "hello": Made(
        "Write 'hello' into /app/hello.txt.",
        "echo hello > /app/hello.txt",
        "echo goodbye > /app/hello.txt",
        READ + "assert Path('/app/hello.txt').read_text().strip() == 'hello'",
    ),
    "sum": Made(
        "Add up the numbers in numbers.txt and write the sum into sum.txt.",
        "python3 -c \"print(sum(map(int, open('numbers.txt'))))\" > sum.txt",
        "echo 12 > sum.txt",
        READ + "assert int(Path('/app/sum.txt').read_text()) == 60",
        {"numbers.txt": "10\n20\n30\n"},
    ),
    "sort": Made(
        "Sort the lines of words.txt in place.",
        "sort -o words.txt words.txt",
        "sort -r -o words.txt words.txt",
        READ + "assert Path('words.txt').read_text().split() == ['ant', 'bee', 'cow']",
        {"words.txt": "cow\nant\nbee\n"},
    ),
    "executable": Made(
        "Make run.sh a program that prints the value of the variable GREETING.",
        "printf '#!/bin/sh\\necho $GREETING\\n' > run.sh && chmod +x run.sh",
        "printf '#!/bin/sh\\necho $GREETING\\n' > run.sh",
        "import subprocess\nassert subprocess.check_output(['./run.sh'], text=True) == 'hi\\n'",
        toml='[environment.env]\nGREETING = "hi"\n',
    ),
    "partial": Made(
        "Write a, b and c into the files a, b and c.",
        "for x in a b c; do echo $x > $x; done",
        "true",
        "",
        test="""#!/bin/bash
n=0; for x in a b c; do [ "$(cat $x 2>/dev/null)" = $x ] && n=$((n+1)); done
python3 -c "import json; print(json.dumps({'reward': $n / 3, 'files': $n}))" \\
> /logs/verifier/reward.json
""",
    ),
    "fix": Made(
        "The function in half.py is wrong. Fix it.",
        "printf 'def half(x):\\n    return x / 2\\n' > half.py",
        "printf 'def half(x):\\n    return x // 2\\n' > half.py",
        "import sys\nsys.path.insert(0, '/app')\nfrom half import half\nassert half(3) == 1.5",
        {"half.py": "def half(x):\n    return x * 2\n"},
    ),
    "json": Made(
        "Change the port in config.json to 8080, and nothing else.",
        "sed -i 's/80,/8080,/' config.json",
        "echo '{\"port\": 8080}' > config.json",
        "import json\n"
        "assert json.load(open('/app/config.json')) == {'port': 8080, 'host': 'localhost'}",
        {"config.json": '{"port": 80, "host": "localhost"}'},
    ),
    "delete": Made(
        "Delete all files of /app/logs that end in .tmp, and no others.",
        "find /app/logs -name '*.tmp' -delete",
        "rm -r /app/logs/*",
        "import os\nassert sorted(os.listdir('/app/logs')) == ['keep.txt']",
        {"logs/a.tmp": "", "logs/b.tmp": "", "logs/keep.txt": "x"},
    ),
    "count": Made(
        "How often does the word 'tree' stand in text.txt? Write the number into /app/count.",
        "cp /solution/answer /app/count",
        "grep -c tree text.txt > /app/count",
        READ
        + "assert Path('/app/count').read_text().strip() == Path('/tests/expected').read_text()",
        {"text.txt": "tree tree\ntree\n"},
    ),
    "key": Made(
        "Write what the solution's variable says into /app/key.",
        'echo "$KEY" > /app/key',
        "echo unknown > /app/key",
        "import os\nassert open('/app/key').read().strip() == os.environ['WANTED'] == 'k-1'",
        toml='[solution.env]\nKEY = "k-1"\n[verifier.env]\nWANTED = "${HARBOR_KIT_UNSET:-k-1}"\n',
    ),
}


def write_tasks(folder: Path, names: list[str] | None = None) -> Path:
    """Write the tasks as folders in `folder`."""
    for name in names or TASKS:
        made = TASKS[name]
        task = folder / name
        files = {
            "task.toml": f'schema_version = "1.4"\n[task]\nname = "kit/{name}"\n'
            '[metadata]\ndifficulty = "easy"\n[agent]\ntimeout_sec = 60.0\n'
            f"[verifier]\ntimeout_sec = 60.0\n{made.toml}",
            "instruction.md": f"<!-- kit canary 0 -->\n\n{made.instruction}\n",
            "environment/Dockerfile": "# No image\nFROM ubuntu:24.04\nWORKDIR /app\n"
            + ("COPY files/ /app/\n" if made.files else ""),
            "tests/test.sh": made.test,
            "tests/check.py": made.check,
            "tests/expected": "3",
            "solution/solve.sh": f"#!/bin/bash\nset -e\n{made.solve}\n",
            "solution/answer": "3",
            **{f"environment/files/{path}": text for path, text in made.files.items()},
        }
        for path, text in files.items():
            (task / path).parent.mkdir(parents=True, exist_ok=True)
            (task / path).write_text(text)
    return folder
