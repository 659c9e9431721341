"""The record of a round: what its clients saw, what was done to the gates, and what was stored at the end.

It is a file of JSON lines: `begin`, then `invoke`, `ok`, `fail`, `unknown` and `fault` in the order of time, then a
`row` for everything stored, each `sample` of a soak, and each `problem`.  `asyncgate torture --judge FILE` judges it
again, without a database.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from asyncgate.conformance import drift, life
from asyncgate.conformance.history import STORED, Call, Stored, assemble, violations

RECORDED_KINDS = {kind.__name__: kind for kind in STORED}
RowsByKind = dict[str, list[Any]]      # by the name of their kind


class Mark(Struct):
    """Something that was done to a gate or its database."""

    at: float
    what: str


class Recorded(Struct):
    """One round: `about` says where it comes from."""

    about: dict[str, Any] = field(default_factory=dict)
    tenant: str = ""
    calls: list[Call] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    rows: RowsByKind = field(default_factory=dict)
    others: list[str] = field(default_factory=list)     # problems that need the database to be found
    samples: list[drift.Sample] = field(default_factory=list)       # of a soak

    def judge(self, checks: frozenset[str] = frozenset()) -> list[str]:
        """Return the violations of the history, of all checks or of those named."""
        final = {self.tenant: self.stored()}
        strays = life.find_strays(final) if not checks or "LIFE" in checks else []
        drifts = drift.judge_samples(self.samples) if not checks or "SOAK" in checks else []
        return [*violations(self.calls, final, checks), *strays, *drifts]

    def stored(self) -> Stored:
        """Return the final state."""
        return assemble({kind: self.rows.get(name, []) for name, kind in RECORDED_KINDS.items()})


def write_record(path: Path, record: Recorded) -> None:
    """Write a round to a file."""
    lines: list[dict[str, Any]] = [{"event": "begin", "tenant": record.tenant, **record.about}]
    lines += sorted([*list_events(record)], key=lambda line: line["at"])
    lines += [{"event": "row", "kind": kind, "row": row} for kind, rows in record.rows.items() for row in rows]
    lines += [{"event": "sample", **msgspec.to_builtins(sample)} for sample in record.samples]
    lines += [{"event": "problem", "text": text} for text in record.others]
    with path.open("wb") as file:
        for line in lines:
            file.write(msgspec.json.encode(line) + b"\n")


def list_events(record: Recorded) -> Iterator[dict[str, Any]]:
    """Yield the beginning and the end of each call, and what was done meanwhile."""
    yield from ({"event": "fault", "at": mark.at, "what": mark.what} for mark in record.marks)
    for number, call in enumerate(record.calls):
        yield {"event": "invoke", "call": number, "at": call.started, "by": call.by, "operation": call.operation,
               "ask": call.ask}
        end = {"call": number, "at": call.ended}
        if call.unknown:
            yield {"event": "unknown", **end, "error": call.error}
        elif call.error is not None:
            yield {"event": "fail", **end, "error": call.error}
        else:
            yield {"event": "ok", **end, "reply": call.reply}


def read_record(path: Path) -> Recorded:
    """Read a round from a file; raises ValueError."""
    record, begun = Recorded(), dict[int, Call]()
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            take_line(record, begun, msgspec.json.decode(text))
        except (AttributeError, KeyError, TypeError, msgspec.MsgspecError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"line {number} of {path} is not a line of a history: {what}") from None
    if not record.tenant:
        raise ValueError(f"{path} is not a history: its first line would say how the round began")
    record.calls = [begun[number] for number in sorted(begun)]
    return record


def take_line(record: Recorded, begun: dict[int, Call], line: dict[str, Any]) -> None:
    """Take in one line."""
    event = line.pop("event")
    if event == "begin":
        record.tenant, record.about = line.pop("tenant"), line
    elif event == "invoke":
        begun[line["call"]] = Call(tenant=record.tenant, operation=line["operation"], ask=line["ask"], by=line["by"],
                                   started=line["at"], ended=line["at"])
    elif event in ("ok", "fail", "unknown"):
        call = begun[line["call"]]
        call.ended, call.reply, call.error = line["at"], line.get("reply"), line.get("error")
    elif event == "fault":
        record.marks.append(Mark(line["at"], line["what"]))
    elif event == "row":
        record.rows.setdefault(line["kind"], []).append(
            msgspec.convert(line["row"], RECORDED_KINDS[line["kind"]], strict=False))
    elif event == "sample":
        record.samples.append(msgspec.convert(line, drift.Sample))
    elif event == "problem":
        record.others.append(line["text"])
    else:
        raise TypeError(f"there is no event {event}")
