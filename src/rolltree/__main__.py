"""`python -m rolltree`: the command line, where the `rolltree` script is not on the path."""

from rolltree.cli import main

main()
