"""The commands `rolltree gateway` and `rolltree serve`."""
