"""A worker that does tasks by handing them to an agent of A2A (`asyncgate worker --a2a CARD_URL --type TYPE`).

A remote agent becomes a type of the gate: its tasks have leases, retries and receipts, its questions are asked at the
gate, and its answers are results.  Which remote task a task has become is a step, so whoever takes the task up after a
crash goes on with the same one.
"""
