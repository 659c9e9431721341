"""The rows of unique work: which task holds which key."""

from __future__ import annotations

from msgspec import Struct

from asyncgate.parts.model.cards import IdText, Plain, stored


@stored("unique_keys", "which task holds a key of unique work", "an hour after that task has ended", "upkeep, hourly",
        left_alone="a hash, which goes after its task")
class UniqueKey(Struct, frozen=True):
    """The task that holds a key, or held it last, and the one that waits for its end."""

    key_digest: IdText                    # of the creator, the type and the key
    task_id: IdText                     # the last task that began to hold it
    since: float                        # when a call first asked for what waits now; a debounce counts from it
    next_id: IdText | None = None       # the task that waits for the end of that one
    joined: Plain[str] = ""             # which requests were answered with which task: hashes and ids, the newest last
