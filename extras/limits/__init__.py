"""Limits as objects with names: set, shown and removed while the gate runs (docs/limits.md)."""
