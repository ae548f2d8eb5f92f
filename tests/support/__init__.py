"""Helpers shared by tests; not collected themselves."""
