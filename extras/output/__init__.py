"""Output: what a task gives while it is worked on, for readers that follow it.

Chunks and the task's changes of state are entries in one stored order, numbered from 1.  So each reader gets the same
ones, at each gate and after each restart, and goes on behind the last one that it has.  A task that gives none costs
nothing; from its first chunk on each change of its state is an entry, too.
"""
