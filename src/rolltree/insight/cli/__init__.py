"""The commands that look at stored runs."""
