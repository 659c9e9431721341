"""Asking: a task waits for the answer of a person or another program, and the gate can prove who gave it."""
