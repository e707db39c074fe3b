"""The token tree and the samples import numpy only."""

from __future__ import annotations

import subprocess
import sys


def test_importing_them_needs_numpy_only() -> None:
    code = (
        "import sys, rolltree.tokens, rolltree.samples; "
        "heavy = {'torch', 'transformers', 'httpx', 'jinja2', 'openai'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
