"""Worlds of real processes on gloo, started once each, every one running many cases.

`python ranks_kit.py CASES OUT` imports everything once, then forks the worlds that the table WORLDS
of the module CASES asks for, one after another; a case returns plain data, rank 0 writes it to OUT.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

LIMIT_S = 840
"""All worlds of a module: 40 to 60 s alone on two cores, and some 15 processes may share these."""


def run_worlds(cases: str, folder: Path) -> dict:
    """Run all worlds of a module of cases in a process of its own and return their results."""
    done = subprocess.run(
        [sys.executable, __file__, cases, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


def fork_world(size: int, place: Path, body, quiet: bool = False) -> list[int]:
    """Run `body(ranks)` in `size` forked processes and return their exit codes."""
    from rolltree.training.models.ranks import start_ranks

    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            if quiet:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
                os.environ.update({name: str(value) for name, value in variables.items()})
                with start_ranks(init_method=f"file://{place}") as ranks:
                    code = body(ranks) or 0
            except BaseException:
                traceback.print_exc()
                code = 1
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(module: str, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    import torch._dynamo  # FSDP2 and checkpointing import it on their first use
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    cases = importlib.import_module(module)
    results: dict[str, object] = {}
    for number, (size, case) in enumerate(cases.WORLDS):
        began = time.monotonic()
        out = folder / f"{number}.json"

        def body(ranks, case=case, out=out):
            found = case(ranks, folder)
            if ranks is None or ranks.leads:
                out.write_text(json.dumps(found))

        codes = fork_world(size, folder / f"world{number}", body)
        if any(codes):
            raise SystemExit(f"world {number} ({case.__name__}, {size} ranks) ended with {codes}")
        results[f"{case.__name__}/{size}"] = json.loads(out.read_text())
        print(f"{case.__name__}/{size}", time.monotonic() - began, file=sys.stderr)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here), str(here.parents[1])]  # the root: for tests_models
    main(sys.argv[1], Path(sys.argv[2]))
