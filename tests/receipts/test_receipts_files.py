"""`asyncgate receipts export`, `verify` and `import`: receipts between gates and files."""

from __future__ import annotations

import gzip
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from asyncgate.clients.http import Http
from asyncgate.commands import carry
from asyncgate.commands.main import main
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.stored import Receipt
from asyncgate.parts.receipts.files import (
    FREELY,
    MOST_LINE,
    MOST_PROBLEMS,
    TIMES,
    Header,
    Line,
    Reading,
    SealedReading,
    Writer,
    decode_line,
    pack_receipts,
)
from tests.conftest import TOKEN, Live

ROUNDS = 150


@pytest.fixture(scope="module")
def gate(live_for_all: Live) -> Iterator[Http]:
    """A gate in which six tasks were done and one is owed, under several seals."""
    with Http(live_for_all.url, TOKEN) as gate:
        for number in range(6):
            gate.call("create_task", type="files", agent_id="ada", payload={"number": number})
            offer = gate.call("lease_next", worker_id="w1")["tasks"][0]
            gate.call("complete", worker_id="w1", task_id=offer["task_id"], lease_id=offer["lease_id"],
                      result={"text": "ünï"}, artifacts=[{"uri": "file:///out"}])
            gate.call("seal_receipts")
        gate.call("create_task", type="files", payload=None, agent_id="ada")
        yield gate


@pytest.fixture
def other(start: Callable[..., Live]) -> Iterator[Http]:
    """An empty gate."""
    with Http(start().url, TOKEN) as gate:
        yield gate


def run(command: str, path: Path, gate: Http | None = None) -> Result:
    where = ["--url", gate.url, "--token", TOKEN] if gate else []
    return CliRunner().invoke(main, ["receipts", command, str(path), *where])


def good(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def file(gate: Http, tmp_path: Path) -> Path:
    good(run("export", path := tmp_path / "out.jsonl", gate))
    return path


def receipts(path: Path) -> list[Any]:
    return [line.receipt for line in Reading(str(path)).lines() if line.receipt]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_what_goes_out_verifies_and_comes_in_as_it_was(gate: Http, other: Http, tmp_path: Path, name: str) -> None:
    out = good(run("export", tmp_path / name, gate))
    checked = good(run("verify", tmp_path / name))
    came = good(run("import", tmp_path / name, other))
    good(run("export", tmp_path / "again.jsonl", other))

    rows = receipts(tmp_path / name)
    assert len(rows) >= 25
    assert f"{len(rows)} receipts under" in out.output
    assert checked.output.endswith(": sound\n")
    assert f"{len(rows)} imported, 0 existed already, 0 refused" in came.output
    assert [replace(receipt, delivered_at=None) for receipt in receipts(tmp_path / "again.jsonl")] == rows
    assert gzip.decompress((tmp_path / name).read_bytes()) if name.endswith("gz") else True
    assert not (tmp_path / f"{name}.partial").exists()


def test_the_chain_of_a_task_that_is_not_here_is_drawn_from_what_was_imported(file: Path, other: Http) -> None:
    good(run("import", file, other))
    task_id = receipts(file)[0].task_id

    told = CliRunner().invoke(main, ["receipts", "tree", task_id, "--url", other.url, "--token", TOKEN])

    head, *lines = good(told).output.splitlines()
    assert (head, len(lines)) == (f"task {task_id}  not here", 4)


def test_to_import_again_finds_all_there(file: Path, other: Http) -> None:
    good(run("import", file, other))

    assert f"0 imported, {len(receipts(file))} existed already" in good(run("import", file, other)).output


def test_an_export_overwrites_nothing(file: Path, gate: Http) -> None:
    before = file.read_bytes()

    assert run("export", file, gate).exit_code == 5
    assert file.read_bytes() == before


@pytest.mark.parametrize("kept", [0, 1, 2, 7, 20, 24])
@pytest.mark.parametrize("torn", [b"", b'{"receipt":{"receipt_id":"01'])
def test_an_export_goes_on_where_it_was_stopped(
        file: Path, gate: Http, tmp_path: Path, kept: int, torn: bytes) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    target = tmp_path / "resumed.jsonl"
    Path(f"{target}.partial").write_bytes(b"".join(lines[:kept]) + torn)

    good(run("export", target, gate))

    assert receipts(target) == receipts(file)
    good(run("verify", target))
    if kept:
        assert target.read_bytes() == file.read_bytes()


def test_a_piece_of_another_tenants_export_is_no_beginning(file: Path, gate: Http, tmp_path: Path) -> None:
    foreign = file.read_bytes().splitlines(keepends=True)[:9]
    foreign[0] = foreign[0].replace(b"00000000-0000-0000-0000-000000000000", b"11111111-1111-4111-8111-111111111111")
    target = tmp_path / "ours.jsonl"
    Path(f"{target}.partial").write_bytes(b"".join(foreign))

    good(run("export", target, gate))

    assert receipts(target) == receipts(file)
    assert b"11111111-1111-4111" not in target.read_bytes()


def test_an_import_meanwhile_spoils_an_export_and_is_told(file: Path, gate: Http, other: Http, tmp_path: Path) -> None:
    other.call("create_task", type="x", payload=None, agent_id="ada")

    def interfere(rows: int) -> None:
        carry.import_file(other, str(file), lambda rows: None)

    with pytest.raises(carry.ExportSpoiled, match="export again"):
        carry.export_receipts(other, str(tmp_path / "spoiled.jsonl"), interfere)
    assert not os.path.exists(tmp_path / "spoiled.jsonl.partial")


# Damage.


def test_any_byte_that_is_changed_is_found(file: Path) -> None:
    text, chance = file.read_bytes(), random.Random(5)
    for _ in range(ROUNDS):
        at = chance.randrange(len(text))
        file.write_bytes(text[:at] + bytes([text[at] ^ (1 << chance.randrange(8))]) + text[at + 1:])
        assert carry.verify_file(str(file)).problems, at


def test_any_byte_that_is_changed_in_a_compressed_file_is_found(gate: Http, tmp_path: Path) -> None:
    good(run("export", path := tmp_path / "out.jsonl.gz", gate))
    text, chance = path.read_bytes(), random.Random(6)
    for _ in range(ROUNDS):
        at = chance.randrange(10, len(text))        # before that gzip says what made it, which nobody reads
        path.write_bytes(text[:at] + bytes([text[at] ^ (1 << chance.randrange(8))]) + text[at + 1:])
        assert carry.verify_file(str(path)).problems or unpacks_to(path, gzip.decompress(text)), at


def unpacks_to(path: Path, text: bytes) -> bool:
    """Whether a file says the same as before: some bits behind the last packed byte mean nothing."""
    return gzip.decompress(path.read_bytes()) == text


def test_any_length_that_is_cut_off_is_found(file: Path) -> None:
    text = file.read_bytes()
    for length in random.Random(7).sample(range(len(text)), 50):
        file.write_bytes(text[:length])
        assert carry.verify_file(str(file)).problems, length


def rewritten(path: Path, change: Callable[[list[Line]], list[Line]]) -> None:
    """Change lines, and make header and trailer fit: only the chain can tell."""
    lines = [decode_line(text) for text in path.read_bytes().splitlines()]
    with path.open("wb") as file:
        writer = Writer(file)
        for line in change(lines[:-1]):
            writer.put(line)
        writer.end()


def of_a_receipt(lines: list[Line]) -> list[int]:
    return [at for at, line in enumerate(lines) if line.receipt]


def test_a_receipt_that_was_changed_is_named_although_the_sum_was_made_anew(file: Path) -> None:
    third = receipts(file)[2]

    rewritten(file, lambda lines: [
        Line(receipt=replace(third, created_at=1.0)) if line.receipt == third else line for line in lines])

    told = run("verify", file)
    assert told.exit_code == 1
    assert f"receipt {third.receipt_id} is not what was sealed (seal 1)" in told.output


def test_a_gap_is_named(file: Path) -> None:
    third = receipts(file)[2]

    rewritten(file, lambda lines: [line for line in lines if line.receipt != third])

    told = run("verify", file).output
    assert "1 receipt is missing between" in told
    assert f"receipt {third.receipt_id}, a parent of " in told


def test_receipts_in_another_order_are_named(file: Path) -> None:
    def turned(lines: list[Line]) -> list[Line]:
        at = of_a_receipt(lines)[1]
        lines[at], lines[at + 1] = lines[at + 1], lines[at]
        return lines

    second, third = receipts(file)[1:3]
    rewritten(file, turned)

    assert f"receipt {second.receipt_id} stands behind {third.receipt_id}, which is out of order" in run(
        "verify", file).output


def test_a_seal_that_is_gone_is_named(file: Path) -> None:
    rewritten(file, lambda lines: [line for line in lines if not (line.seal and line.seal.number == 2)])

    assert "seal 2 is missing: the next one is number 3" in run("verify", file).output


def test_a_damaged_file_is_not_imported(file: Path, other: Http) -> None:
    text = file.read_bytes()
    file.write_bytes(text.replace(b'"from_id":"w1"', b'"from_id":"w2"', 1))

    told = run("import", file, other)

    assert (told.exit_code, "nothing was imported" in told.output) == (1, True)
    assert other.call("list_receipts")["receipts"] == []


def test_what_is_there_otherwise_is_told_and_stays(file: Path, gate: Http, other: Http, tmp_path: Path) -> None:
    first = receipts(file)[0]
    good(run("import", file, other))

    def changed(lines: list[Line]) -> list[Line]:
        kept = [line for line in lines if not line.seal]
        kept[0] = Line(header=replace(kept[0].header, seals=0, seal_hash=""))       # type: ignore[type-var]
        return [Line(receipt=replace(first, created_at=1.0)) if line.receipt == first else line for line in kept]

    rewritten(file, changed)
    told = run("import", file, other)

    assert told.exit_code == 5
    assert f"{first.receipt_id}: differs: another receipt already has this id here, and stays" in told.output
    good(run("export", tmp_path / "still.jsonl", other))
    assert receipts(tmp_path / "still.jsonl")[0] == first


@pytest.mark.parametrize("command", ["verify", "import"])
def test_a_file_that_is_not_there_is_said_in_a_line(command: str, tmp_path: Path, gate: Http) -> None:
    told = run(command, tmp_path / "none", gate if command == "import" else None)

    assert (told.exit_code, told.output) == (2, f"Error: {tmp_path / 'none'}: No such file or directory\n")


def test_a_file_of_something_else_is_no_file_of_receipts(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"hello\n")

    held = SealedReading(str(tmp_path / "other"))

    assert list(held.lines()) == [Line()]
    assert any("line 1 is not the header" in problem for problem in held.problems)


# Files that others have made (a file of a megabyte may unpack to a gigabyte).

HEADER = b'{"header": {"format": "asyncgate-receipts", "tenant_id": "t"}}\n'


@pytest.mark.parametrize(("text", "says"), [
    (HEADER + b"x" * (MOST_LINE + 2), "the line is longer than"),
    (HEADER + b"x\n" * (2 * MOST_PROBLEMS), "too many problems"),
    (HEADER + (b" " * 100_000 + b"{}\n") * 1000, "it unpacks to more than"),
    (HEADER + b"[" * 974 + b"]" * 974 + b"\n", "nested"),
], ids=["a line", "problems", "size", "depth"])
def test_a_file_that_unpacks_to_far_more_than_it_is_is_not_read_to_its_end(
        text: bytes, says: str, tmp_path: Path) -> None:
    (path := tmp_path / "bomb.gz").write_bytes(gzip.compress(text, 9))

    held = SealedReading(str(path))
    lines = sum(1 for _ in held.lines())

    assert any(says in problem for problem in held.problems), held.problems[:3]
    assert len(held.problems) <= MOST_PROBLEMS + 5
    assert lines <= (FREELY + TIMES * path.stat().st_size) // 2


@pytest.mark.parametrize("body", ["漢" * 21_000, '"' * 32_000], ids=["letters of three bytes", "escaped quotes"])
def test_what_an_import_sends_at_once_fits_into_one_request(file: Path, tmp_path: Path, body: str) -> None:
    receipt = replace(receipts(file)[0], body=msgspec.json.encode({"text": body}).decode())
    path = tmp_path / "large.jsonl.gz"
    path.write_bytes(pack_receipts(Header("asyncgate-receipts", "t"), [receipt] * 120))

    sizes = [len(msgspec.json.encode({"receipts": batch})) for batch in carry.encode_batches(str(path))]

    assert max(sizes) <= Settings().max_request_bytes


def test_what_an_import_weighs_is_what_it_sends(file: Path) -> None:
    [batch] = carry.encode_batches(str(file))

    assert [type(raw) for raw in batch] == [msgspec.Raw] * len(receipts(file))      # encoded once, and sent so
    assert msgspec.json.decode(msgspec.json.encode(batch), type=list[Receipt]) == receipts(file)
