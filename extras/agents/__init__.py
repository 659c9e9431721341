"""Agents of other frameworks as task functions: they are killed and go on, and ask people at the gate.

Each module needs its framework, and is imported by whoever uses it.
"""
