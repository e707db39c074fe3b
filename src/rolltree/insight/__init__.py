"""Stored runs looked at: audit, compare, replay, rescore, search, export, the page."""
