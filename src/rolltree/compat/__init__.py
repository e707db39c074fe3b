"""Environments written for verifiers 0.1.8, run by rolltree.

`rolltree.compat.verifiers` has the module paths and names of that API; `install()` makes `import
verifiers` resolve to it, so such an environment runs unchanged. Its trainers and scripts are not
covered.
"""

from rolltree.compat.install import install, uninstall

__all__ = ["install", "uninstall"]
