"""Unique work: what becomes of a request for work that is already under way (docs/unique.md)."""
