"""Every value that several rooms share, and the one hierarchy of exceptions."""
