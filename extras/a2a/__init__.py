"""A2A: agents of other makers hand work to a gate, and follow it, in the protocol that they speak among each other.

The face translates: it calls the table of operations and nothing else, so receipts, limits, the audit log and metrics
are those of every other face.  One task of A2A is one task of the gate, its agent the type of the task, and its context
the session in which the task was created.
"""
