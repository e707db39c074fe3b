"""`rolltree audit`: every check of a stored run, without an environment and, but for one, torch."""
