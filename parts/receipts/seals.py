"""Seals: a chain of hashes over the receipts of each tenant.

A seal covers the receipts between the youngest that the seal before covers and its own `last_id`; receipts that were
imported later are covered by a seal that lists them.  `SealChain` checks receipts against seals, wherever both come
from: a database, an archive, an exported file.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from itertools import chain

import msgspec
from msgspec.structs import astuple

from asyncgate.parts.model import stored
from asyncgate.parts.model.erased import read_note

MARK = 8        # bytes of each digest that a seal keeps

_encode = msgspec.json.Encoder().encode
_ids = msgspec.json.Decoder(list[str]).decode
START = stored.SealHead()


def receipt_digest(receipt: stored.Receipt) -> bytes:
    """Hash every byte of a stored receipt, without its delivery time; of an erased one return the hash that it had.

    A receipt of a ledger or of an older release has no salt; its hash leaves the salt out.
    """
    if (note := read_note(receipt.body)) is not None:
        return bytes.fromhex(note.sealed)
    *facts, salt, parents, _ = astuple(receipt)
    return hashlib.sha256(_encode((*facts, parents, salt) if salt else (*facts, parents))).digest()


def entry_digest(entry: stored.Entry) -> bytes:
    """Hash every byte of a ledger's entry.

    An entry of an older release has no author; its hash leaves the author out, as when it was sealed.
    """
    if (note := read_note(entry.content)) is not None:
        return bytes.fromhex(note.sealed)
    row = astuple(entry)
    return hashlib.sha256(_encode(row if entry.stated_kind else row[:-3])).digest()


def make_seal(head: stored.SealHead, digests: list[bytes], last_id: str, at: float,
              late: Iterable[str] = ()) -> stored.Seal:
    """Make the next seal over receipts with these digests; the time must be a whole number of milliseconds."""
    named = list(late)
    return link_seal(head, stored.Seal(
        f"{head.number + 1:012d}", head.number + 1, last_id, len(digests), hash_digests(digests),
        base64.b64encode(b"".join([digest[:MARK] for digest in digests])).decode(),
        _encode(named).decode() if named else "", at, ""))


def hash_digests(digests: Iterable[bytes]) -> str:
    """Hash the digests of several receipts."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def link_seal(head: stored.SealHead, seal: stored.Seal) -> stored.Seal:
    """Return a seal with its hash, which covers the seal before it."""
    return msgspec.structs.replace(
        seal, hash=hashlib.sha256(_encode((head.hash, *astuple(seal)[:-1]))).hexdigest())


def seal_head(seal: stored.Seal, imports: int = 0) -> stored.SealHead:
    """Return the head of the chain that ends with this seal."""
    return stored.SealHead(seal.number, seal.last_id, seal.hash, imports)


class SealChain:
    """Checks receipts against their seals: add the seals in order, see the receipts in order, then close."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.ranges: list[stored.Seal] = []
        self.head = START
        self.late = set[str]()                      # the receipts that seals list
        self.listed: list[stored.Seal] = []         # those seals
        self.digests: dict[str, bytes] = {}         # of listed receipts
        self.at = 0                                 # index of the current range in `ranges`
        self.pending: list[tuple[str, bytes]] = []  # receipts seen in that range
        self.seen, self.unsealed, self.before = 0, 0, ""

    def add(self, seal: stored.Seal) -> None:
        """Add the next seal; a wrong one is reported and does not stop the check."""
        if seal.number != self.head.number + 1:
            self.problems.append(f"seal {self.head.number + 1} is missing: the next one is number {seal.number}")
        elif link_seal(self.head, seal).hash != seal.hash:
            self.problems.append(f"seal {seal.number} was changed after it was written")
        self.head = seal_head(seal)
        if not seal.late:
            self.ranges.append(seal)
            return
        self.listed.append(seal)
        self.late.update(self._listed(seal))

    def _listed(self, seal: stored.Seal) -> list[str]:
        try:
            return _ids(seal.late)
        except msgspec.DecodeError:
            return []       # its hash does not fit either

    def ends(self, head: stored.SealHead | None) -> None:
        """Compare the last seal with the stored head of the chain."""
        head = head or START
        if (head.number, head.hash) != (self.head.number, self.head.hash):
            self.problems.append(f"the seals end with number {self.head.number}, {self.head.hash[:16]}, but number "
                                 f"{head.number}, {head.hash[:16]}, was the last one written")

    def see(self, receipt_id: str, digest: bytes) -> None:
        """Check the next receipt, in the order of ids."""
        self.seen += 1
        if receipt_id <= self.before:
            self.problems.append(f"receipt {receipt_id} stands behind {self.before}, which is out of order")
            return
        self.before = receipt_id
        if receipt_id in self.late:
            self.digests[receipt_id] = digest
            return
        while self.at < len(self.ranges) and receipt_id > self.ranges[self.at].last_id:
            self._finish()
        if self.at < len(self.ranges):
            self.pending.append((receipt_id, digest))
        else:
            self.unsealed += 1

    def close(self) -> list[str]:
        """Compare the remaining ranges and lists; return all problems."""
        while self.at < len(self.ranges):
            self._finish()
        for seal in self.listed:
            ids = self._listed(seal)
            held = [(id, self.digests[id]) for id in ids if id in self.digests]
            if hash_digests([digest for _, digest in held]) != seal.digest:
                self.problems += find_differences(seal, held, ids)
        return self.problems

    def _finish(self) -> None:
        """Compare a range with its seal, and go on to the next."""
        seal, held = self.ranges[self.at], self.pending
        self.at, self.pending = self.at + 1, []
        if len(held) != seal.count or hash_digests([digest for _, digest in held]) != seal.digest:
            self.problems += find_differences(seal, held)


def find_differences(seal: stored.Seal, held: list[tuple[str, bytes]], ids: list[str] | None = None) -> Iterator[str]:
    """Describe each receipt that differs from its seal: changed, missing, or added."""
    try:
        marks = base64.b64decode(seal.marks)
    except ValueError:
        marks = b""
    sealed = [marks[at:at + MARK] for at in range(0, len(marks), MARK)]
    if ids is not None:
        return find_listed_differences(seal, dict(held), list(zip(ids, sealed, strict=False)))
    present = [digest[:MARK] for _, digest in held]
    steps = SequenceMatcher(None, sealed, present, autojunk=False).get_opcodes()
    told = list(chain.from_iterable(
        describe_step(seal, held, was, now) for what, *at in steps if what != "equal"
        for was, now in [((at[0], at[1]), (at[2], at[3]))]))
    return iter(told or [f"the receipts of seal {seal.number} are not those that were sealed"])


def find_listed_differences(seal: stored.Seal, held: dict[str, bytes],
                            sealed: list[tuple[str, bytes]]) -> Iterator[str]:
    """Describe each wrong receipt that a seal lists."""
    for receipt_id, mark in sealed:
        if receipt_id not in held:
            yield f"receipt {receipt_id} is missing: seal {seal.number} lists it"
        elif held[receipt_id][:MARK] != mark:
            yield f"receipt {receipt_id} is not what was sealed (seal {seal.number})"


def describe_step(seal: stored.Seal, held: list[tuple[str, bytes]], was: tuple[int, int],
                  now: tuple[int, int]) -> Iterator[str]:
    """Describe the changes of one run of neighbouring receipts."""
    there = [receipt_id for receipt_id, _ in held[now[0]:now[1]]]
    gone = was[1] - was[0]
    for receipt_id in there[:gone]:
        yield f"receipt {receipt_id} is not what was sealed (seal {seal.number})"
    for receipt_id in there[gone:]:
        yield f"receipt {receipt_id} was not there when its time was sealed (seal {seal.number})"
    if (missing := gone - len(there)) > 0:
        before = held[now[1] - 1][0] if now[1] else "the beginning of the seal"
        after = held[now[1]][0] if now[1] < len(held) else seal.last_id
        yield (f"{missing} receipt{'s are' if missing > 1 else ' is'} missing between {before} and {after} "
               f"(seal {seal.number})")
