"""Environments written for verifiers 0.1.8, run by rolltree.

`rolltree.compat.verifiers` has the module paths and names of that API; `install()` makes `import
verifiers` resolve to it, so that such an environment runs unchanged. The room stands outside the
layers and may import any of them. It leaves out the trainers and scripts of verifiers.
"""

from rolltree.compat.install import install, uninstall

__all__ = ["install", "uninstall"]
