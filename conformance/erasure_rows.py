"""Rows of an erasure that has ended, for tests of what happens to every table."""

from __future__ import annotations

from asyncgate import Work
from asyncgate.parts.model import stored
from asyncgate.parts.model.erased import digest_of_list

ERASURE_ID = "01000000-0000-7000-8000-00000000e7a5"


def keep_erasure(work: Work, mark: str) -> None:
    """Store an erasure and a row that it has changed."""
    row = stored.Erased("receipts", "a receipt that is gone", ERASURE_ID, mark, mark)
    work.keep_record(row)
    work.keep_record(stored.Erasure(ERASURE_ID, work.tenant_id, "agent", "erased-0", "[]", "", "ended", "[]", "{}",
                                    work.now,
                                    work.now, digest_of_list([row]), mark))
