"""The checks of `rolltree audit`; they need neither an environment nor, but for one, torch."""
