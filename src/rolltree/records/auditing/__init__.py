"""The checks of `rolltree audit`: without an environment and, except for `recompute`, torch."""
