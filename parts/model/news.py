"""What the processes that share a database tell each other."""

from __future__ import annotations

from msgspec import Struct

Announced = tuple[str, str, str]        # of a receipt: id of its recipient, type, task; an empty text says nothing


class Change(Struct, frozen=True, omit_defaults=True):
    """A change of state that has no receipt, as those who follow it are told."""

    change: str                                             # progress, task.held and so on, or worker.seen
    at: float
    task_id: str = ""
    type: str = ""
    status: str = ""
    held: str = ""
    owner: tuple[str, str] = ("", "")                       # kind and id
    worker: tuple[str, str, str] = ("", "", "")             # kind, id and instance; of the lease
    number: int = 0                                         # of a progress; or how many changes are left out


class News(Struct, frozen=True):
    """What one process has committed with a batch, as far as the others must know it soon."""

    tenant_id: str
    queued: tuple[tuple[str, tuple[str, ...]], ...] = ()    # type and needed capabilities of each task, claimable now
    ended: tuple[str, ...] = ()                             # tasks
    due: float | None = None                                # when the first of the delayed tasks may be leased
    many: bool = False                                      # more than is listed: look for whatever there may be
    keys: tuple[str, ...] = ()                              # issued keys that have changed
    account: bool = False                                   # whether what is agreed with the tenant has changed
    posted: bool = False                                    # whether receipts wait for the ledger
    lapse: float | None = None                              # when a lease runs out, earlier than was known before
    receipts: tuple[Announced, ...] = ()                    # new receipts
    changes: tuple[Change, ...] = ()                        # those that have no receipt, while somebody follows them
    followed: bool = False                                  # whether somebody follows them here
    pauses: bool = False                                    # whether what is paused has changed
    outputs: tuple[str, ...] = ()                           # tasks with further output
    types: bool = False                                     # whether what is declared of types has changed
    handed: bool = False                                    # whether an application has handed work over in SQL
    families: tuple[str, ...] = ()                          # tasks of which children have ended
