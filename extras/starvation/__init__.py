"""Tells who created a task that it waits much longer than those beside it (in the manner of H.7)."""
