"""`asyncgate export`: everything about a tenant or a principal in one archive that a person can read and check.

While it is written, the archive is a folder beside its target: one file of JSON Lines for each kind of row, and
state.json, which says how far each file is good and where the export goes on.  The state is replaced after the rows are
on disk, so a killed export resumes behind its last whole page.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec
from msgspec import Meta, Raw, Struct, field

from asyncgate import __version__
from asyncgate.clients.http import Http, Refusal
from asyncgate.commands import calling
from asyncgate.commands.new_file import hold_new_file
from asyncgate.commands.profiles import Connection
from asyncgate.commands.terminal import Bar, escape_text
from asyncgate.commands.verdicts import print_answer
from asyncgate.parts.model import errors, wire
from asyncgate.parts.model.words import say_count
from asyncgate.parts.process.folders import open_private, replacing

FORMAT, README, MANIFEST, STATE_FILE = "asyncgate-export", "README.txt", "manifest.json", "state.json"
MOST_MANIFEST, PIECE = 4 * 2**20, 2**20
LONGEST_WAIT_SECONDS = 60.0
WRONG_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, msgspec.DecodeError,
             UnicodeDecodeError)
KindName = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]*$(?!\\n)")]       # it becomes the name of a file


class Page(Struct):
    """A page as the gate sends it."""

    tenant: str
    principal: wire.Principal | None
    kind: KindName
    purpose: str
    begun_at: str
    read_at: str
    looked_at: int
    rows: list[Raw]
    left_out: list[str]
    kinds: list[KindName]
    next_cursor: str | None
    is_first: bool = False      # of its kind, which comes again if receipts came back from the gate's archive


class ExportedKind(Struct):
    """What the archive has of one kind of row."""

    kind: str
    purpose: str
    left_out: list[str]         # fields that no export has, because they prove who somebody is
    read_from: str              # the rows are as they were between these two times
    read_to: str
    rows: int = 0
    bytes: int = 0
    sha256: str = ""            # of the whole file

    @property
    def name(self) -> str:
        """Return the name of its file."""
        return f"{self.kind}.jsonl"


class Manifest(Struct):
    """What an archive has."""

    format: str
    version: int
    about: str                  # tenant or principal
    tenant: str
    principal: wire.Principal | None
    begun_at: str
    ended_at: str
    made_by: str
    readme_sha256: str
    kinds: list[ExportedKind]


class ExportState(Struct):
    """How far an unfinished export is."""

    asked: dict[str, Any]       # the operation and its fields
    cursor: str | None = None
    begun_at: str = ""
    tenant: str = ""
    principal: wire.Principal | None = None
    expected: list[str] = field(default_factory=list)
    kinds: dict[str, ExportedKind] = field(default_factory=dict)
    whole: bool = False


class OtherExport(errors.Conflicting):
    """The unfinished archive belongs to another export, or to one that cannot be resumed any more: it must go."""


decode_page = msgspec.json.Decoder(Page).decode


@click.group(cls=calling.CommandGroup)
def export() -> None:
    """Write everything about a tenant or a principal into one archive, and verify such an archive."""


@export.command("tenant")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--tenant", metavar="TENANT", help="The tenant, by id or name, for the operator; default your own.")
@calling.as_json
@calling.add_gate_options
def export_tenant(at: Connection, file: str, tenant: str | None, as_json: bool) -> None:
    """Write everything about a tenant into FILE, a zip archive, without secrets.

    For admins.  The gate keeps running, and audits the export.  FILE appears when it is complete; after an
    interruption, the same command resumes within seven days.
    """
    write_and_print(at, file, {"operation": "export_tenant", "tenant": tenant}, as_json)


@export.command("principal")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--principal-kind", metavar="KIND", help="Kind of the principal; default agent.")
@click.option("--principal-id", metavar="ID", help="The principal; default the one of your credential.")
@click.option("--tenant", metavar="TENANT", help="Its tenant, by id or name, for the operator; default your own.")
@calling.as_json
@calling.add_gate_options
def export_principal(at: Connection, file: str, principal_kind: str | None, principal_id: str | None,
                     tenant: str | None, as_json: bool) -> None:
    """Write everything about a principal into FILE, a zip archive, without secrets.

    For admins; others export themselves, if their credential has the scope admin:read.  The gate keeps running, and
    audits the export.  FILE appears when it is complete; after an interruption, the same command resumes within seven
    days.
    """
    write_and_print(at, file, {"operation": "export_principal", "principal_kind": principal_kind,
                               "principal_id": principal_id, "tenant": tenant}, as_json)


@export.command("verify")
@click.argument("file", type=click.Path(dir_okay=False))
@calling.as_json
def verify_export(file: str, as_json: bool) -> None:
    """Verify an exported FILE, without a database or a gate.

    Checks that every file of the manifest is there, has its SHA-256 and its rows, and that there is no other.  Exit
    status 1 if a check fails.
    """
    with calling.exit_on_error(file):
        manifest, problems = verify_archive(file)
        digest = hash_file(Path(file))
    rows = sum(kind.rows for kind in manifest.kinds) if manifest else 0
    print_answer(as_json, {"file": file, "sound": not problems, "problems": problems, "rows": rows, "sha256": digest},
                 *map(escape_text, problems), *([describe(manifest)] if manifest else []), f"SHA-256 {digest}",
                 f"{file}: {'sound' if not problems else 'damaged'}")
    if problems:
        raise click.exceptions.Exit(calling.EXIT_BROKEN)


def describe(manifest: Manifest) -> str:
    """Say in one line what an archive is about."""
    about = f"principal {manifest.principal} of tenant" if manifest.principal else "tenant"
    rows, kinds = sum(kind.rows for kind in manifest.kinds), len(manifest.kinds)
    return escape_text(f"{about} {manifest.tenant}: {say_count(rows, 'row')} of {say_count(kinds, 'kind')}, "
                       f"begun at {manifest.begun_at}")


# From a gate to an archive.


def write_and_print(at: Connection, file: str, asked: dict[str, Any], as_json: bool) -> None:
    """Write an archive, and print what it has."""
    asked = {name: value for name, value in asked.items() if value is not None}
    with calling.exit_on_error(file), hold_new_file(file), closing(Bar("exporting", "rows")) as bar, (
            calling.connect_to_gate(at)) as gate:
        try:
            manifest = write_archive(gate, file, asked, bar.add)
        except OtherExport as other:
            raise OtherExport(f"{other}: remove {file}.partial and export again") from None
    digest = hash_file(Path(file))
    rows = {kind.kind: kind.rows for kind in manifest.kinds}
    print_answer(as_json, {"file": file, "rows": rows, "sha256": digest}, describe(manifest),
                 f"{file}: SHA-256 {digest}")


def write_archive(gate: Http, target: str, asked: dict[str, Any], count: Callable[[int], None]) -> Manifest:
    """Write everything that a gate answers into an archive; call `count` with the number of rows looked at."""
    partial = PartialArchive(target, asked)
    fields = {name: value for name, value in asked.items() if name != "operation"}
    while not partial.state.whole:
        page = fetch_page(gate, asked["operation"], {**fields, "cursor": partial.state.cursor})
        partial.add(page)
        count(page.looked_at)
    return partial.finish()


def fetch_page(gate: Http, operation: str, fields: dict[str, Any]) -> Page:
    """Return one page; wait as long as the gate asks for, because a large export needs many calls."""
    while True:
        try:
            return decode_page(gate.send(operation, fields).content)
        except Refusal as refusal:
            if refusal.code == "invalid_cursor":
                raise OtherExport(f"the gate does not resume this export: {refusal}") from None
            if refusal.status not in (429, 503) or refusal.retry_after is None:
                raise
            time.sleep(min(refusal.retry_after, LONGEST_WAIT_SECONDS))


class PartialArchive:
    """An unfinished archive, as a folder; a restarted export resumes it."""

    def __init__(self, target: str, asked: dict[str, Any]) -> None:
        self.target, self.folder = target, Path(f"{target}.partial")
        self.state = self._read_state(asked)

    def _read_state(self, asked: dict[str, Any]) -> ExportState:
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise OtherExport(f"{self.folder} is of a backup or of an export of receipts")
        if not (path := self.folder / STATE_FILE).exists():
            return ExportState(asked)
        state = msgspec.json.decode(path.read_bytes(), type=ExportState)
        if state.asked != asked:
            raise OtherExport(f"{self.folder} belongs to another export")
        return state

    def add(self, page: Page) -> None:
        """Add a page."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        state, kind = self.state, page.kind
        if page.is_first or kind not in state.kinds:
            state.kinds[kind] = ExportedKind(kind, page.purpose, page.left_out, page.read_at, page.read_at)
        exported = state.kinds[kind]
        with open(self.folder / exported.name, "ab", opener=open_private) as file:
            file.truncate(exported.bytes)        # what a killed export has written and not counted
            for row in page.rows:
                exported.bytes += file.write(bytes(msgspec.json.format(row, indent=-1)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        exported.rows, exported.read_to = exported.rows + len(page.rows), page.read_at
        state.begun_at, state.tenant, state.principal = page.begun_at, page.tenant, page.principal
        state.expected, state.cursor, state.whole = page.kinds, page.next_cursor, page.next_cursor is None
        self._write(STATE_FILE, msgspec.json.encode(state))

    def _write(self, name: str, content: bytes) -> None:
        """Replace a small file."""
        with replacing(str(self.folder / name), str(self.folder / f"{name}.new")) as file:
            file.write(content)

    def finish(self) -> Manifest:
        """Write readme and manifest, pack all files, rename the archive to its target, and remove the folder."""
        state = self.state
        kinds = [state.kinds[kind] for kind in state.expected]
        for kind in kinds:
            os.truncate(self.folder / kind.name, kind.bytes)
            kind.sha256 = hash_file(self.folder / kind.name)
        ended_at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        manifest = Manifest(FORMAT, 1, "principal" if state.principal else "tenant", state.tenant, state.principal,
                            state.begun_at, ended_at, f"AsyncGate {__version__}", "", kinds)
        self._write(README, format_readme(manifest).encode())
        manifest.readme_sha256 = hash_file(self.folder / README)
        self._write(MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        with replacing(self.target, str(self.folder / "packed.zip")) as raw, (
                zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED)) as archive:
            for name in (README, MANIFEST, *(kind.name for kind in kinds)):
                archive.write(self.folder / name, name)
        shutil.rmtree(self.folder)
        return manifest


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def format_readme(manifest: Manifest) -> str:
    """Say to a person what is in an archive."""
    whose = f"the principal {manifest.principal} of tenant {manifest.tenant}" if manifest.principal else (
        f"tenant {manifest.tenant}")
    wide = max(len(kind.name) for kind in manifest.kinds)
    files = "\n".join(f"  {kind.name:{wide}} {kind.rows:>9}  {kind.purpose}" for kind in manifest.kinds)
    left_out = "\n".join(f"  {kind.name:{wide}} {', '.join(kind.left_out)}" for kind in manifest.kinds if kind.left_out)
    return README_TEXT.format(
        whose=whose, meant=MEANT if manifest.principal else "", begun=manifest.begun_at, ended=manifest.ended_at,
        files=files, left_out=left_out, made_by=manifest.made_by, manifest=MANIFEST)


MEANT = """
That is: each row that names the principal, the tasks that it owns or was the last to work on with all that belongs to
them, and the rows of people who act as it.
"""
README_TEXT = """\
Everything that an AsyncGate stores about {whose}.
{meant}
Begun at {begun}, ended at {ended}, made by {made_by}.

Each file has one kind of rows; each line is one row, a JSON object.  Times are in UTC.

  FILE, ROWS, WHY THE GATE KEEPS THEM
{files}

The gate kept running meanwhile.  {manifest} says between which times each file was read; what was stored when the
export began, and neither changed nor deleted meanwhile, is as it was then.

These fields are left out, because they prove who somebody is; the gate stores only hashes of secrets:

{left_out}

Logs, backups, metrics and a ledger outside of the gate are not part of it: ask those who run them.

To check that nothing was changed: `asyncgate export verify FILE`, or compare the SHA-256 of each file with
{manifest}.
"""


# An archive by itself.


def verify_archive(path: str) -> tuple[Manifest | None, list[str]]:
    """Check an archive; return its manifest, if that can be read, and all problems."""
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = read_manifest(archive)
            return manifest, list(find_problems(archive, manifest))
    except WRONG_ZIP as wrong:
        return None, [f"{path} is not an archive that `asyncgate export` wrote, or it is damaged: {wrong}"]


def read_manifest(archive: zipfile.ZipFile) -> Manifest:
    """Return the manifest of an archive."""
    if MANIFEST not in archive.namelist():
        raise zipfile.BadZipFile(f"it has no {MANIFEST}")
    with archive.open(MANIFEST) as file:
        manifest = msgspec.json.decode(file.read(MOST_MANIFEST), type=Manifest)
    if (manifest.format, manifest.version) != (FORMAT, 1):
        raise zipfile.BadZipFile(f"this release reads {FORMAT} version 1, not {manifest.format} {manifest.version}")
    return manifest


def find_problems(archive: zipfile.ZipFile, manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with the files of an archive."""
    there, named = archive.namelist(), {README, MANIFEST, *(kind.name for kind in manifest.kinds)}
    yield from (f"{name} is not in the manifest" for name in sorted({*there} - named))
    yield from (f"{name} is there {there.count(name)} times" for name in sorted(named) if there.count(name) > 1)
    if README in there and hash_member(archive, README, MOST_MANIFEST)[0] != manifest.readme_sha256:
        yield f"{README} was changed"
    yield from (f"{name} is missing" for name in sorted(named - {*there}))
    for kind in manifest.kinds:
        if kind.name in there:
            yield from check_kind(archive, kind)


def check_kind(archive: zipfile.ZipFile, kind: ExportedKind) -> Iterator[str]:
    """Yield what is wrong with one file of rows."""
    try:
        digest, rows = hash_member(archive, kind.name, kind.bytes)
    except WRONG_ZIP as wrong:
        yield f"{kind.name} cannot be read: {wrong}"
        return
    if digest != kind.sha256:
        yield f"{kind.name} was changed: its SHA-256 is {digest[:16]}…, and the manifest says {kind.sha256[:16]}…"
    if rows != kind.rows:
        yield f"{kind.name} has {rows} rows, and the manifest says {kind.rows}"


def hash_member(archive: zipfile.ZipFile, name: str, most: int) -> tuple[str, int]:
    """Return the SHA-256 and the lines of a file in an archive; a small archive may hold a huge file."""
    sum, lines, size = hashlib.sha256(), 0, 0
    with archive.open(name) as file:
        while piece := file.read(PIECE):
            sum.update(piece)
            lines, size = lines + piece.count(b"\n"), size + len(piece)
            if size > most:
                raise zipfile.BadZipFile(f"{name} is larger than the {most} bytes that it should have")
    return sum.hexdigest(), lines
