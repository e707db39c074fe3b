"""Adapters that no real counterpart has tested yet. Import them by module."""
