"""`asyncgate export`: one archive, whole after any interruption, in which every change is found."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from asyncgate.clients.http import Http
from asyncgate.commands import export, new_file
from asyncgate.commands.main import main
from tests.conftest import TOKEN, Live

Pack = dict[str, bytes]


class Killed(BaseException):
    """The process dies here."""


@pytest.fixture(scope="module")
def gate(live_for_all: Live) -> Iterator[Http]:
    """A gate in which five tasks of ada and one of bob were done."""
    with Http(live_for_all.url, TOKEN) as gate:
        for number in range(6):
            gate.call("create_task", type="files", agent_id="ada" if number else "bob", payload={"text": "ünï\u2028"})
            offer = gate.call("lease_next", worker_id="w1")["tasks"][0]
            gate.call("complete", worker_id="w1", task_id=offer["task_id"], lease_id=offer["lease_id"],
                      result={"n": number}, artifacts=[{"uri": "file:///out"}])
        gate.call("issue_key", name="k", principal_id="ada")
        yield gate


def run(gate: Http | None, *arguments: str) -> Result:
    where = ["--url", gate.url, "--token", TOKEN] if gate else []
    return CliRunner().invoke(main, ["export", *arguments, *where])


def good(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def file(gate: Http, tmp_path: Path) -> Path:
    good(run(gate, "tenant", str(path := tmp_path / "all.zip")))
    return path


def unpack(path: Path) -> Pack:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(path: Path, files: Pack) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def test_an_archive_has_its_rows_a_manifest_and_a_page_for_people(gate: Http, tmp_path: Path) -> None:
    told = good(run(gate, "principal", str(path := tmp_path / "ada.zip"), "--principal-id", "ada", "--json"))
    checked = good(run(None, "verify", str(path)))

    files = unpack(path)
    manifest = json.loads(files["manifest.json"])
    tasks = [json.loads(line) for line in files["tasks.jsonl"].decode().split("\n")[:-1]]
    assert [(task["owner_id"], task["payload"]) for task in tasks] == [("ada", {"text": "ünï\u2028"})] * 5
    assert {task["outcome"]["n"] for task in tasks} == {1, 2, 3, 4, 5}
    assert json.loads(told.output)["rows"]["tasks"] == 5
    assert b"principal agent ada of tenant" in files["README.txt"]
    assert {kind["kind"]: kind["left_out"] for kind in manifest["kinds"]}["api_keys"] == ["hash"]
    assert {*files} == {"README.txt", "manifest.json", *(f"{kind['kind']}.jsonl" for kind in manifest["kinds"])}
    assert checked.output.endswith(": sound\n")
    assert (path.stat().st_mode & 0o777, Path(f"{path}.partial").exists()) == (0o600, False)


def test_an_export_overwrites_nothing(file: Path, gate: Http) -> None:
    before = file.read_bytes()

    assert run(gate, "tenant", str(file)).exit_code == 5
    assert file.read_bytes() == before


def write(gate: Http, target: Path, dies_after: int = 10_000) -> None:
    """Export in small pages, until it is whole or the process dies."""
    left = iter(range(dies_after))

    def count(rows: int) -> None:
        if next(left, None) is None:
            raise Killed

    export.write_archive(gate, str(target), {"operation": "export_tenant", "limit": 3}, count)


@pytest.mark.parametrize("counted", [True, False], ids=["after its page is counted", "before its page is counted"])
def test_an_export_goes_on_where_it_was_killed(file: Path, gate: Http, tmp_path: Path, counted: bool) -> None:
    target, whole, kills = tmp_path / "resumed.zip", unpack(file), 0
    folder = Path(f"{target}.partial")
    while not target.exists():
        before = (folder / "state.json").read_bytes() if folder.exists() else b""
        with suppress(Killed):
            write(gate, target, dies_after=kills % 4)
            break
        kills += 1
        for torn in folder.glob("*.jsonl"):
            torn.write_bytes(torn.read_bytes() + b'{"torn":')
        (folder / "packed.zip").write_bytes(b"PK")
        if not counted and before and kills % 2:        # the page came, and its state did not
            (folder / "state.json").write_bytes(before)

    files = unpack(target)
    assert kills > 10
    assert {name for name, content in whole.items() if files[name] != content} <= {
        "README.txt", "manifest.json", "audit.jsonl", "audit_heads.jsonl"}
    assert export.verify_archive(str(target))[1] == []
    assert not folder.exists()


def test_a_kind_that_comes_again_replaces_what_had_come_of_it(file: Path, gate: Http, tmp_path: Path) -> None:
    asked = {"operation": "export_tenant", "limit": 3}
    pages = [export.fetch_page(gate, "export_tenant", {"limit": 3})]
    while (cursor := pages[-1].next_cursor) is not None:
        pages.append(export.fetch_page(gate, "export_tenant", {"limit": 3, "cursor": cursor}))
    kinds = [page.kind for page in pages]
    again, behind = kinds.index("receipts"), len(kinds) - kinds[::-1].index("archived")
    archive = export.PartialArchive(str(tmp_path / "again.zip"), asked)

    for page in (*pages[:behind], *pages[again:]):
        archive.add(page)
    manifest = archive.finish()

    assert export.verify_archive(archive.target)[1] == []
    assert unpack(Path(archive.target))["receipts.jsonl"] == unpack(file)["receipts.jsonl"]
    assert {kind.kind: kind.rows for kind in manifest.kinds}["receipts"] > 3


@pytest.mark.parametrize("command", [("export", "tenant"), ("receipts", "export")], ids=" ".join)
def test_only_one_process_writes_a_file_and_a_killed_one_holds_nobody_up(
        gate: Http, tmp_path: Path, command: tuple[str, str]) -> None:
    target, lock = tmp_path / "all.zip", tmp_path / "all.zip.partial.lock"

    def export(url: str) -> list[str]:
        return [*command, str(target), "--url", url, "--token", TOKEN]

    with socket.create_server(("127.0.0.1", 0)) as mute:        # a gate that never answers
        address = f"http://127.0.0.1:{mute.getsockname()[1]}"
        first = subprocess.Popen([sys.executable, "-m", "asyncgate", *export(address)])
        with mute.accept()[0]:
            second = CliRunner().invoke(main, export(gate.url))
            first.kill()
            first.wait()
    assert (second.exit_code, f"another process is writing {target} now" in second.output) == (5, True)
    assert [*tmp_path.iterdir()] == [lock]

    good(CliRunner().invoke(main, export(gate.url)))
    assert [*tmp_path.iterdir()] == [target]


def test_a_lock_file_that_goes_while_it_is_opened_is_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = os.open(path, os.O_CREAT | os.O_RDWR)

    assert new_file.is_still_at(str(path), lock)
    path.unlink()
    assert not new_file.is_still_at(str(path), lock)
    path.touch()
    assert not new_file.is_still_at(str(path), lock)
    os.close(lock)


def test_a_piece_of_another_export_is_no_beginning(gate: Http, tmp_path: Path) -> None:
    with suppress(Killed):
        write(gate, tmp_path / "all.zip", dies_after=2)

    told = run(gate, "principal", str(tmp_path / "all.zip"), "--principal-id", "ada")

    assert (told.exit_code, "belongs to another export: remove" in told.output) == (5, True)


def test_what_another_command_left_unfinished_is_named_with_its_cure(gate: Http, tmp_path: Path) -> None:
    (tmp_path / "all.zip.partial").write_text("{}")
    (tmp_path / "all.jsonl.partial").mkdir()

    everything = run(gate, "tenant", str(tmp_path / "all.zip"))
    receipts = CliRunner().invoke(main, ["receipts", "export", str(tmp_path / "all.jsonl"), "--url", gate.url,
                                         "--token", TOKEN])

    assert (everything.exit_code, f"remove {tmp_path / 'all.zip.partial'} and export" in everything.output) == (5, True)
    assert (receipts.exit_code, "all.jsonl.partial is a folder" in receipts.output) == (1, True)
    assert (tmp_path / "all.zip.partial").read_text() == "{}"


def test_an_export_that_the_gate_does_not_know_any_more_is_told_to_begin_again(gate: Http, tmp_path: Path) -> None:
    with suppress(Killed):
        write(gate, target := tmp_path / "all.zip", dies_after=2)
    state = Path(f"{target}.partial") / "state.json"
    content = msgspec.json.decode(state.read_bytes())
    state.write_bytes(msgspec.json.encode(content | {"asked": {"operation": "export_tenant"}, "cursor": "none"}))

    told = run(gate, "tenant", str(target))

    assert (told.exit_code, f"remove {target}.partial and export again" in told.output) == (5, True)


def test_a_refused_export_leaves_nothing(gate: Http, tmp_path: Path) -> None:
    told = run(gate, "principal", str(tmp_path / "me.zip"))

    assert (told.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "principal_id is missing" in told.output


def test_a_gate_cannot_name_a_file_elsewhere(gate: Http) -> None:
    page = msgspec.json.decode(gate.send("export_tenant", {}).content)

    with pytest.raises(msgspec.ValidationError):
        export.decode_page(msgspec.json.encode(page | {"kind": "../tasks"}))


# Damage.


def change_row(files: Pack) -> Pack:
    return files | {"tasks.jsonl": files["tasks.jsonl"].replace(b'"ada"', b'"eve"', 1)}


def drop_row(files: Pack) -> Pack:
    return files | {"tasks.jsonl": files["tasks.jsonl"].partition(b"\n")[2]}


def drop_file(files: Pack) -> Pack:
    return {name: content for name, content in files.items() if name != "receipts.jsonl"}


def drop_manifest(files: Pack) -> Pack:
    return {name: content for name, content in files.items() if name != "manifest.json"}


def add_file(files: Pack) -> Pack:
    return files | {"more.jsonl": b"{}"}


def change_readme(files: Pack) -> Pack:
    return files | {"README.txt": b"All is well."}


def change_count(files: Pack) -> Pack:
    return files | {"manifest.json": files["manifest.json"].replace(b'"rows": 6', b'"rows": 5', 1)}


def change_format(files: Pack) -> Pack:
    return files | {"manifest.json": files["manifest.json"].replace(b'"version": 1', b'"version": 2', 1)}


@pytest.mark.parametrize(("change", "told"), [
    (change_row, "tasks.jsonl was changed"), (drop_row, "tasks.jsonl was changed"),
    (drop_file, "receipts.jsonl is missing"), (drop_manifest, "no manifest.json"),
    (add_file, "more.jsonl is not in the manifest"), (change_readme, "README.txt was changed"),
    (change_count, "has 6 rows, and the manifest says 5"), (change_format, "reads asyncgate-export version 1")])
def test_a_changed_archive_is_found(file: Path, change: Callable[[Pack], Pack], told: str) -> None:
    pack(file, change(unpack(file)))

    verdict = run(None, "verify", str(file))

    assert (verdict.exit_code, told in verdict.output) == (1, True), verdict.output


def test_an_archive_that_unpacks_to_more_than_it_says_is_not_read_on(file: Path) -> None:
    files = unpack(file)
    pack(file, files | {"tasks.jsonl": files["tasks.jsonl"] + b"\n" * 5_000_000})

    assert "larger than" in run(None, "verify", str(file)).output


def test_any_damaged_bytes_are_found(file: Path) -> None:
    text, whole, chance = file.read_bytes(), unpack(file), random.Random(7)
    with zipfile.ZipFile(file) as archive:
        packed = [range(info.header_offset + 30 + len(info.filename), info.header_offset + 30 + len(info.filename)
                        + info.compress_size) for info in archive.infolist() if info.compress_size > 2]
    for _ in range(100):
        at = chance.choice(chance.choice(packed))
        file.write_bytes(text[:at] + bytes([text[at] ^ (1 << chance.randrange(8))]) + text[at + 1:])
        assert export.verify_archive(str(file))[1] or unpack(file) == whole, at     # some bits only fill up a byte
    for kept in (0, 1, len(text) // 2, len(text) - 1):
        file.write_bytes(text[:kept])
        assert run(None, "verify", str(file)).exit_code == 1


def test_a_file_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    assert run(None, "verify", str(tmp_path / "none.zip")).output.count("\n") == 1
