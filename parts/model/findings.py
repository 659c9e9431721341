"""What an examination of an installation finds: each finding with its severity, what was seen, and its cure."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from asyncgate.parts.model import errors, wire

Gravity = Literal["ok", "note", "warning", "error"]
LIMIT_CURE = "unset security.rate_limiting.enabled; `asyncgate set-limits TENANT --tier TIER` says what each may use"
GRAVITIES: tuple[Gravity, ...] = ("ok", "note", "warning", "error")     # from the least to the worst


class Finding(Struct, frozen=True, omit_defaults=True):
    """What one check has seen; a finding that is not ok has a cure: the next command or setting."""

    check: Annotated[str, wire.says("the check that found it")]
    severity: Annotated[Gravity, wire.says("ok and note need no action; warning: soon; error: now")]
    seen: Annotated[str, wire.says("what was seen")]
    cure: Annotated[str, wire.says("the next command or setting")] = ""


def all_well(seen: str) -> Finding:
    """Return that something is as it should be."""
    return Finding("", "ok", seen)


def note(seen: str, cure: str = "") -> Finding:
    """Return what is worth knowing, and harms nobody."""
    return Finding("", "note", seen, cure)


def warn(seen: str, cure: str) -> Finding:
    """Return what will do harm."""
    return Finding("", "warning", seen, cure)


def alarm(seen: str, cure: str) -> Finding:
    """Return what does harm now, or keeps the gate from its work."""
    return Finding("", "error", seen, cure)


def worst_of(findings: list[Finding]) -> Gravity:
    """Return the worst severity among findings."""
    return max((finding.severity for finding in findings), key=GRAVITIES.index, default="ok")


class ExamineGate(wire.Ask, kw_only=True):
    """Examine the gate."""

    example = ({}, {"severity": "warning", "findings": [
        {"check": "rights", "severity": "ok", "seen": "3 files, which only their owner may read"},
        {"check": "disk", "severity": "warning", "seen": "the disk of the database has 803 MiB left",
         "cure": "free space there, or move the database to a larger disk"}]})
    refusals = (errors.Forbidden,)


class Examination(Struct):
    """What was found, in the order of the checks, and the worst severity."""

    columns = "severity check seen cure"
    severity: Gravity
    findings: list[Finding]
