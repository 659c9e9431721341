"""Large payloads and results in a folder and in a real S3 server, with a gate, a client and a worker."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncgate.clients import Done, Job, SyncGate, TaskFailed, Worker
from asyncgate.clients.testing import Gate
from asyncgate.commands.main import main
from asyncgate.extras.payloads import (
    FolderStore,
    NotInStore,
    PayloadDamaged,
    Payloads,
    S3Store,
    find_result,
    open_store,
    read_pointer,
)
from tests.support import s3_server

s3 = s3_server.s3
LARGE = {"text": "é" * 2000}


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an empty store of each kind."""
    if request.param == "folder":
        (tmp_path / "pay loads").mkdir()
        return open_store((tmp_path / "pay loads").as_uri())
    for name, value in {"AWS_ENDPOINT_URL": request.getfixturevalue("s3"), **s3_server.SURROUNDINGS}.items():
        monkeypatch.setenv(name, value)
    bucket = f"b{time.monotonic_ns()}"
    opened = open_store(f"s3://{bucket}/pay loads")
    assert isinstance(opened, S3Store)
    opened.client.create_bucket(Bucket=bucket)
    return opened


@contextlib.contextmanager
def working(gate: Any, payloads: Payloads, function: Callable[[Any, Job], Any]) -> Iterator[None]:
    """Let a worker with the store do tasks of the type `large`."""
    worker = Worker(gate.url, "w1", token=gate.token, state=None, payloads=payloads)
    worker.task("large")(function)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join()


def open_client(gate: Any, payloads: Payloads | None) -> SyncGate:
    """Return a client of the gate with the store."""
    return SyncGate(gate.url, gate.token, agent_id="ada", payloads=payloads)


def test_a_large_payload_and_result_go_through_the_store_and_the_receipts_have_their_hashes(store: Any) -> None:
    payloads = Payloads(store, above_bytes=1000)
    seen: list[Any] = []

    def double(payload: Any, job: Job) -> Any:
        seen.append(payload)
        return {"text": payload["text"] * 2}
    with Gate(port=0) as gate, open_client(gate, payloads) as client, working(gate, payloads, double):
        handle = client.submit("large", LARGE, key="once")
        result = handle.result(timeout=60)
        again = client.submit("large", LARGE, key="once")
        task = handle.task()
        receipts = client.call("list_receipts", task_id=handle.task_id, to_kind="agent", to_id="ada")["receipts"]

    assert (seen, result) == ([LARGE], {"text": LARGE["text"] * 2})
    assert (again.task_id, again.payload_differs) == (handle.task_id, False)
    pointer = read_pointer(task.payload_pointer)
    assert pointer is not None
    assert (task.payload, len(list(store.list()))) == (None, 2)
    assert task.result is not None
    assert task.result.result is None
    told = str(receipts)
    assert pointer.sha256 in told
    kept_result = find_result(task.result.artifacts)
    assert kept_result is not None
    assert kept_result.sha256 in told


def test_a_small_value_stays_in_the_gate(store: Any) -> None:
    payloads = Payloads(store)
    with Gate(port=0) as gate, open_client(gate, payloads) as client, working(gate, payloads, lambda p, job: p + 1):
        handle = client.submit("large", 1)
        assert handle.result(timeout=60) == 2
        assert handle.task().payload == 1

    assert list(store.list()) == []


def test_what_was_changed_in_the_store_is_refused_by_the_worker_and_by_who_reads_the_result(store: Any) -> None:
    payloads = Payloads(store, above_bytes=1000)
    with Gate(port=0) as gate, open_client(gate, payloads) as client:
        damaged = client.submit("large", LARGE)
        pointer = read_pointer(damaged.task().payload_pointer)
        assert pointer is not None
        store.put(pointer.sha256, b'{"text":"' + b"x" * (pointer.bytes - 11) + b'"}')
        with working(gate, payloads, lambda payload, job: "y" * 2000):
            with pytest.raises(TaskFailed) as failed:
                damaged.result(timeout=60)
            done = client.submit("large", {"text": "z" * 3000})
            done.ended(timeout=60)
        outcome = done.task().result
        assert outcome is not None
        stored_result = find_result(outcome.artifacts)
        assert stored_result is not None
        store.put(stored_result.sha256, b"null")
        with pytest.raises(PayloadDamaged, match="is not what was stored"):
            done.result(timeout=60)

    assert failed.value.error is not None
    assert failed.value.error["code"] == "payload_damaged"


def test_a_pointer_to_another_place_is_not_followed(store: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    name = "a" * 64
    other = tmp_path / "other" / name[:2] / name
    other.parent.mkdir(parents=True)
    other.write_text("{}")

    for uri in (secret.as_uri(), other.as_uri(), f"s3://elsewhere/{name}", "http://127.0.0.1:9/x",
                f"{store.put(name, b'{}')[:-64]}../../{name}"):
        with pytest.raises(NotInStore):
            store.get(uri, 100)


def test_batches_and_completions_by_hand_use_the_store_too(store: Any) -> None:
    payloads = Payloads(store, above_bytes=1000)
    with Gate(port=0) as gate, open_client(gate, payloads) as client:
        client.create_tasks([{"type": "large", "payload": LARGE}, {"type": "large", "payload": 1}])
        worker = client.speaking_as(worker_id="w1")
        offers = worker.lease_next(max_tasks=2).tasks
        for offer in offers:
            worker.complete(offer.task_id, offer.lease_id, result="r" * 5000)
        results = [client.handle(offer.task_id).result(timeout=60) for offer in offers]

    assert sorted(offer.payload is None for offer in offers) == [False, True]
    assert results == ["r" * 5000] * 2


def test_a_result_is_found_behind_artifacts_of_the_worker_and_survives_a_cleaning(store: Any) -> None:
    payloads = Payloads(store, above_bytes=1000)
    own = [{"type": "result", "uri": "s3://reports/1.pdf", "sha256": "ab" * 32, "bytes": 12},
           {"type": "result", "uri": "https://example.com/x", "sha256": "abc"},
           {"type": "result", "uri": "https://example.com/x", "sha256": 7, "bytes": None}]
    with Gate(port=0) as gate, open_client(gate, payloads) as client, working(
            gate, payloads, lambda payload, job: Done(payload, artifacts=own if payload else own[1:])):
        large, empty = client.submit("large", LARGE), client.submit("large", None)
        assert (large.result(timeout=60), empty.result(timeout=60)) == (LARGE, None)
        left_behind = store.put("b" * 64, b"left behind")
        age(store)
        clean(gate, store)
        assert large.result(timeout=60) == LARGE

    if isinstance(store, FolderStore):      # objects of S3 are seconds old
        with pytest.raises(NotInStore, match="is gone"):
            store.get(left_behind, 100)


def age(store: Any) -> None:
    """Let everything in a folder be two hours old."""
    for path in store.folder.rglob("*") if isinstance(store, FolderStore) else ():
        os.utime(path, (time.time() - 7200,) * 2)


def clean(gate: Any, store: Any) -> str:
    """Run `asyncgate clean-payloads`; return what it prints."""
    url = store.folder.as_uri() if isinstance(store, FolderStore) else f"s3://{store.bucket}/{store.prefix}"
    arguments = ["clean-payloads", url, "--older-than-hours", "1", "--url", gate.url]
    return CliRunner().invoke(main, arguments, env={"ASYNCGATE_API_KEY": gate.token}, catch_exceptions=False).output


def test_cleaning_deletes_what_no_task_names_and_keeps_what_is_young(store: Any, tmp_path: Path) -> None:
    payloads = Payloads(store, above_bytes=1000)
    with Gate(port=0) as gate, open_client(gate, payloads) as client:
        named = read_pointer(client.submit("large", LARGE).task().payload_pointer)
        store.put("b" * 64, b"left behind")
        age(store)
        told = clean(gate, store)

    assert named is not None
    names = {kept.name for kept in store.list()}
    if isinstance(store, FolderStore):
        assert (told, names) == ("deleted 1, kept 1 that tasks name\n", {named.sha256})
    else:       # whose objects are seconds old
        assert (told, len(names)) == ("deleted 0, kept 0 that tasks name\n", 2)
        assert store.delete("b" * 64, time.time() + 60)
        assert {kept.name for kept in store.list()} == {named.sha256}


def test_cleaning_deletes_what_a_writer_that_was_killed_has_left(tmp_path: Path) -> None:
    store, name = FolderStore(tmp_path), "c" * 64
    store.put(name, b"{}")
    ids = uuid.uuid4().hex, uuid.uuid4()        # as Python and TypeScript write them
    left = [tmp_path / name[:2] / f"{name}.{id}.new" for id in ids]
    for path in left:
        path.write_bytes(b"{")
    stranger = tmp_path / name[:2] / "notes.new"
    stranger.write_bytes(b"")
    age(store)
    young = tmp_path / name[:2] / f"{name}.{uuid.uuid4().hex}.new"
    young.write_bytes(b"{")
    with Gate(port=0) as gate:
        assert clean(gate, store) == "deleted 3, kept 0 that tasks name\n"

    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {young, stranger}


def test_cleaning_a_store_that_does_not_exist_is_an_error(store: Any, tmp_path: Path) -> None:
    url, problem = (((tmp_path / "typo").as_uri(), f"there is no folder {tmp_path / 'typo'}")
                    if isinstance(store, FolderStore) else ("s3://typo/tasks", "s3://typo/tasks/ cannot be listed: "))
    told = CliRunner().invoke(main, ["clean-payloads", url])

    assert (told.exit_code, told.stdout) == (2, "")
    assert told.stderr.startswith(f"Error: {problem}")
    assert not (tmp_path / "typo").exists()


def test_a_store_that_takes_nothing_fails_the_attempt_and_the_next_one_succeeds(tmp_path: Path) -> None:
    class Away(FolderStore):
        def put(self, name: str, content: bytes) -> str:
            self.tries = getattr(self, "tries", 0) + 1
            if self.tries == 1:
                raise OSError("the disk is full")
            return super().put(name, content)
    payloads = Payloads(Away(tmp_path), above_bytes=1000)
    with Gate(port=0) as gate, open_client(gate, payloads) as client, working(
            gate, payloads, lambda payload, job: "y" * 2000):
        handle = client.submit("large", 1, retry_backoff_seconds=0)
        assert handle.result(timeout=60) == "y" * 2000
        assert handle.task().attempt == 1


def test_a_store_has_an_address_and_anything_else_is_refused() -> None:
    with pytest.raises(ValueError, match="a store is file:"):
        open_store("ftp://x")
