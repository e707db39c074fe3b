"""Environments written for verifiers 0.1.8, run by rolltree as verifiers ran them.

Loading one provides `import verifiers`; `rolltree.verifiers.install()` does the same for scripts
that import it themselves. `rolltree.verifiers.names` says where each public name is. The
trainers of verifiers are not covered.
"""

from rolltree.environments.verifiers_import import install, uninstall

__all__ = ["install", "uninstall"]
