"""`asyncgate doctor` finds what is broken, says the cure, changes nothing, and leaves a healthy gate in peace."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import socket
import sqlite3
import ssl
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from asyncgate.backends import migrate
from asyncgate.backends.sqlite import FileLock
from asyncgate.commands.main import main
from asyncgate.conformance.ledgers import LedgerServer
from asyncgate.parts.model.findings import Examination, Finding
from tests.conftest import TOKEN, Live
from tests.identity.test_limits_redis import started
from tests.support.receiptgate_stand_in import KEY, StandIn, served

STRONG = "correct-horse-battery-staple-42"
NOWHERE = "http://127.0.0.1:9"


class Bench:
    """An installation of its own, and the doctor who is called to it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.file, self.patch = folder, folder / "gate.db", patch
        for name in [name for name in os.environ if name.startswith("ASYNCGATE_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(folder))
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        patch.setenv("ASYNCGATE_API_KEY", STRONG)
        os.chmod(folder, 0o700)
        asyncio.run(migrate(f"sqlite:///{self.file}"))

    def private(self, name: str, text: bytes | str, mode: int = 0o600) -> Path:
        """Write a file with these rights."""
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return path

    def change(self, sql: str, *given: Any) -> None:
        """Change the file behind the gate's back."""
        with contextlib.closing(sqlite3.connect(self.file)) as db:
            db.execute(sql, given)
            db.commit()

    def store(self, table: str, **fields: Any) -> None:
        """Write a row of the tenant t; what is not said of it is empty."""
        with contextlib.closing(sqlite3.connect(self.file)) as db:
            db.execute("UPDATE wall SET tenant_id = 't'")
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            row = {**dict.fromkeys(names, 0), "tenant_id": "t", **fields}
            db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", [row[name] for name in names])
            db.commit()

    def examined(self, *sets: str, options: tuple[str, ...] = ()) -> tuple[int, list[Finding]]:
        """Run the doctor with these settings; return the exit status and what was found."""
        given = [part for setting in sets for part in ("--set", setting)]
        asked = ["doctor", "--json", "--database", f"sqlite:///{self.file}", *given, *options]
        ran = CliRunner().invoke(main, asked, prog_name="asyncgate")
        assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
        return ran.exit_code, told(ran.stdout)


def told(text: str) -> list[Finding]:
    import msgspec
    return msgspec.json.decode(text, type=Examination).findings


def worse(findings: list[Finding]) -> list[Finding]:
    """What is neither ok nor says only how slow or full a shared disk is now."""
    return [finding for finding in findings if finding.severity != "ok" and finding.check != "disk"]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def certificate(bench: Bench, days: float, mode: int = 0o600) -> str:
    """Make a certificate with its key in one file, valid for so many days from now."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gate")])
    last = datetime.now(UTC) + timedelta(days=days)
    made = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(last - timedelta(days=90))
            .not_valid_after(last).sign(key, hashes.SHA256()))
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                               serialization.NoEncryption())
    return str(bench.private(f"{days}.pem", made.public_bytes(serialization.Encoding.PEM) + secret, mode))


def lost_lease(bench: Bench, at: float) -> None:
    """Put a live lease into the file that ran out at a time."""
    bench.change("INSERT INTO tenants (tenant_id, since) VALUES ('t', 0)")
    bench.store("leases", task_id="k", lease_id="l", worker_kind="worker", worker_id="w", fence=1, expires_at=at,
                ending="live")


# What is planted: settings to examine with.  Then what is found of it: check, severity, what was seen, its cure.
Plant = Callable[[Bench], list[str]]
FAULTS: dict[str, tuple[Plant, tuple[str, str, str, str]]] = {}


def fault(check: str, severity: str, seen: str, cure: str) -> Callable[[Plant], Plant]:
    """Add a fault to those that are planted."""
    def add(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = plant, (check, severity, seen, cure)
        return plant
    return add


@fault("settings", "error", "archive.enabled is on, and there is no folder", "set archive.directory")
def an_archive_without_a_folder(bench: Bench) -> list[str]:
    return ["archive.enabled=true"]


@fault("settings", "note", "ledger.url decides nothing: receipt_mode is standalone", "unset ledger.url")
def a_setting_that_decides_nothing(bench: Bench) -> list[str]:
    return ["ledger.url=http://localhost:1"]


@fault("settings", "note", "database.leases decides nothing: ", "unset database.leases")
def a_setting_that_no_release_reads(bench: Bench) -> list[str]:
    return ["database.leases=postgres"]


@fault("settings", "warning", "api_key is easy to guess", "openssl rand -hex 32")
def a_weak_token(bench: Bench) -> list[str]:
    return ["api_key=change-me"]


@fault("settings", "error", "api_key is easy to guess", "openssl rand -hex 32")
def a_weak_token_that_strangers_may_try(bench: Bench) -> list[str]:
    return ["api_key=change-me", "host=192.0.2.1"]


@fault("settings", "warning", "others reach the gate over plain HTTP", "security.tls.certificate_path")
def plain_http(bench: Bench) -> list[str]:
    return ["host=192.0.2.1"]


@fault("settings", "warning", "allow_insecure_dev is on", "unset allow_insecure_dev")
def a_gate_that_is_open_to_this_machine(bench: Bench) -> list[str]:
    return ["allow_insecure_dev=true"]


@fault("settings", "warning", "trusted_proxies holds every address", "trusted_proxies")
def a_proxy_that_is_everybody(bench: Bench) -> list[str]:
    return ["trusted_proxies=0.0.0.0/0"]


@fault("log", "warning", "log_level is error", "log_level=info")
def a_log_that_hides_refusals(bench: Bench) -> list[str]:
    return ["log_level=error"]


@fault("log", "warning", "lacks password", "sensitive_fields")
def a_log_that_may_hold_passwords(bench: Bench) -> list[str]:
    return ["security.audit_logging.sensitive_fields=token,api_key"]


@fault("rights", "error", "open to every user of this machine (mode 644)", "chmod 600 ")
def a_database_that_everybody_reads(bench: Bench) -> list[str]:
    bench.file.chmod(0o644)
    return []


@fault("rights", "error", "is a folder", "correct the setting, so that it names a file")
def a_database_that_is_a_folder_of_everybody(bench: Bench) -> list[str]:
    bench.file.unlink()
    bench.file.mkdir()
    bench.file.chmod(0o777)
    return []


@fault("rights", "warning", "open to its group (mode 660)", "chmod 600 ")
def a_database_that_its_group_changes(bench: Bench) -> list[str]:
    bench.file.chmod(0o660)
    return []


@fault("rights", "error", "gate.db may not be written by this user", "chmod u+w ")
def a_database_that_may_only_be_read(bench: Bench) -> list[str]:
    bench.patch.setattr(os, "access", lambda path, mode: mode != os.W_OK)       # root may write any file
    return []


def refuse_writes(bench: Bench, number: int) -> list[str]:
    """Let the system refuse new files, with this errno."""
    def fail(**where: Any) -> Any:
        raise OSError(number, os.strerror(number))
    bench.patch.setattr(tempfile, "TemporaryFile", fail)
    return []


@fault("disk", "error", "takes no write: No space left on device", "free space in it")
def a_full_disk(bench: Bench) -> list[str]:
    return refuse_writes(bench, errno.ENOSPC)


@fault("disk", "error", "takes no write: Read-only file system", "writable")
def a_disk_that_may_only_be_read(bench: Bench) -> list[str]:
    return refuse_writes(bench, errno.EROFS)


@fault("disk", "note", "is not measured: this user may not write there", "run this as the gate's user")
def a_folder_of_somebody_else(bench: Bench) -> list[str]:
    return refuse_writes(bench, errno.EACCES)


@fault("rights", "error", "lets every user put another file in the place of this one", "chmod 700 ")
def a_folder_that_everybody_writes(bench: Bench) -> list[str]:
    bench.folder.chmod(0o777)
    return []


@fault("rights", "error", "the file of ASYNCGATE_API_KEY_FILE", "chmod 600 ")
def a_token_in_a_file_that_everybody_reads(bench: Bench) -> list[str]:
    bench.patch.delenv("ASYNCGATE_API_KEY")
    bench.patch.setenv("ASYNCGATE_API_KEY_FILE", str(bench.private("token", STRONG, 0o644)))
    return []


@fault("rights", "error", "the settings file, which holds secrets,", "chmod 600 ")
def settings_with_a_secret_that_everybody_reads(bench: Bench) -> list[str]:
    bench.patch.delenv("ASYNCGATE_API_KEY")
    bench.patch.setenv("ASYNCGATE_CONFIG", str(bench.private("gate.yaml", f"api_key: {STRONG}\n", 0o644)))
    return []


@fault("rights", "error", "the key of TLS", "chmod 600 ")
def a_private_key_that_everybody_reads(bench: Bench) -> list[str]:
    return [f"security.tls.certificate_path={certificate(bench, 60, 0o644)}"]


@fault("rights", "error", "the key that signs access tokens", "correct the setting")
def a_signing_key_that_is_not_there(bench: Bench) -> list[str]:
    return [f"security.jwt.private_key_path={bench.folder / 'missing.pem'}"]


@fault("settings", "error", "public_url is not set", "set public_url")
def an_authorization_server_without_an_address(bench: Bench) -> list[str]:
    return ["security.oauth.enabled=true", "security.jwt.private_key_path=key.pem"]


@fault("settings", "error", "no key to sign access tokens with", "asyncgate keys signing make")
def an_authorization_server_without_a_key(bench: Bench) -> list[str]:
    return ["security.oauth.enabled=true", "public_url=https://gate.example.com"]


@fault("tls", "error", "expired on", "renew the certificate, then restart")
def a_certificate_that_expired(bench: Bench) -> list[str]:
    return [f"security.tls.certificate_path={certificate(bench, -1)}"]


@fault("tls", "warning", "expires on", "renew the certificate, then restart")
def a_certificate_that_expires_next_week(bench: Bench) -> list[str]:
    return [f"security.tls.certificate_path={certificate(bench, 7)}"]


@fault("tls", "error", "cannot be used: ", "a certificate and its own key")
def a_certificate_with_the_key_of_another(bench: Bench) -> list[str]:
    return [f"security.tls.certificate_path={certificate(bench, 60)}",
            f"security.tls.private_key_path={certificate(bench, 61)}"]


@fault("archive", "error", "is not a folder", "set archive.directory")
def an_archive_that_is_a_file(bench: Bench) -> list[str]:
    return [f"archive.directory={bench.private('archive', '')}"]


@fault("archive", "warning", "the archive", "chmod 700 ")
def an_archive_that_everybody_reads(bench: Bench) -> list[str]:
    (bench.folder / "old").mkdir(mode=0o755)
    return [f"archive.directory={bench.folder / 'old'}"]


@fault("database", "warning", "there is no database at ", "--database")
def a_database_that_is_not_there(bench: Bench) -> list[str]:
    bench.file.unlink()
    return []


@fault("database", "error", "is a database of another program", "set database.url to the file of the gate")
def a_database_of_another_program(bench: Bench) -> list[str]:
    bench.file.unlink()
    bench.change("CREATE TABLE songs (title TEXT)")
    bench.file.chmod(0o600)
    return []


@fault("database", "error", "cannot be read as a database", "asyncgate verify")
def a_database_that_is_damaged(bench: Bench) -> list[str]:
    bench.private("gate.db", b"SQLite format 3\0" + bytes(8192))
    return []


@fault("database", "error", "has no schema of the gate", "asyncgate migrate")
def a_database_that_is_not_migrated(bench: Bench) -> list[str]:
    bench.file.unlink()
    bench.change("PRAGMA user_version = 1")
    bench.file.chmod(0o600)
    return []


@fault("database", "error", "has schema 99", "run the newer release")
def a_database_of_a_newer_release(bench: Bench) -> list[str]:
    bench.change("UPDATE meta SET value = '99' WHERE name = 'schema_version'")
    return []


@fault("database", "error", "with another first migration", "asyncgate receipts export")
def a_database_that_began_otherwise(bench: Bench) -> list[str]:
    bench.change("UPDATE meta SET value = 'f00' WHERE name = 'first_migration'")
    return []


@fault("database", "error", " in the future: the clock was set back", "timedatectl set-ntp true")
def a_clock_that_was_set_back(bench: Bench) -> list[str]:
    bench.change("INSERT OR REPLACE INTO meta VALUES ('sign_of_life', ?)", str(time.time() + 3600))
    return []


@fault("database", "note", "and no gate serves", "asyncgate serve")
def a_lease_that_ran_out_while_nobody_served(bench: Bench) -> list[str]:
    lost_lease(bench, time.time() - 3600)
    return []


@fault("database", "warning", "because the ledger refused them: 1", "asyncgate reconcile --repair")
def a_parked_receipt(bench: Bench) -> list[str]:
    bench.store("outbox", receipt_id="r", state="parked", posted_at=time.time())
    return []


@fault("database", "error", "receipts wait for a ledger (1), and receipt_mode is standalone", "set receipt_mode")
def receipts_that_nobody_sends(bench: Bench) -> list[str]:
    bench.store("outbox", receipt_id="r", state="waiting", posted_at=time.time())
    return []


@fault("database", "error", "nobody can enter", "asyncgate keys issue")
def a_gate_without_a_way_in(bench: Bench) -> list[str]:
    bench.patch.delenv("ASYNCGATE_API_KEY")
    return []


@fault("ledger", "error", "does not answer", "start the ledger")
def a_ledger_that_is_away(bench: Bench) -> list[str]:
    return ["receipt_mode=memorygate_integrated", f"ledger.url={NOWHERE}", f"ledger.auth_token={STRONG}"]


@fault("ledger", "error", "needs ledger.url", "correct the settings of the ledger")
def a_ledger_without_an_address(bench: Bench) -> list[str]:
    return ["receipt_mode=receiptgate_integrated"]


@fault("limits", "warning", "does not answer, so each gate counts alone", "security.rate_limiting.redis_url")
def a_store_of_limits_that_is_away(bench: Bench) -> list[str]:
    limiting = "security.rate_limiting"
    return [f"{limiting}.enabled=true", f"{limiting}.storage=redis", f"{limiting}.redis_url=redis://127.0.0.1:9"]


@fault("limits", "error", "does not answer, so every call is refused", "security.rate_limiting.redis_url")
def a_store_of_limits_that_is_away_and_needed(bench: Bench) -> list[str]:
    return [*a_store_of_limits_that_is_away(bench), "security.rate_limiting.on_store_failure=deny"]


@fault("settings", "warning", "others reach the gate, and limits are off", "set-limits")
def limits_that_are_off_for_others(bench: Bench) -> list[str]:
    return ["host=0.0.0.0", "security.rate_limiting.enabled=false"]


@fault("database", "warning", "2 tenants share this gate, and limits are off", "set-limits")
def limits_that_are_off_for_several_tenants(bench: Bench) -> list[str]:
    for tenant in ("t", "u"):
        bench.change("INSERT INTO tenants (tenant_id, since) VALUES (?, 0)", tenant)
    return ["security.rate_limiting.enabled=false"]


@fault("versions", "warning", "click is 0.1", "pip install --upgrade 'click>=")
def a_package_that_is_too_old(bench: Bench) -> list[str]:
    old = bench.folder / "site" / "click-0.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: click\nVersion: 0.1\n")
    bench.patch.syspath_prepend(old.parent)
    return []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_cure(name: str, bench: Bench) -> None:
    plant, (check, severity, seen, cure) = FAULTS[name]

    status, findings = bench.examined(*plant(bench))

    [finding] = [finding for finding in findings
                 if finding.check == check and finding.severity == severity and seen in finding.seen]
    assert cure in finding.cure
    worst = {finding.severity for finding in findings}
    assert status == (1 if worst & {"warning", "error"} else 0)


def test_the_faults_are_found_alone(bench: Bench) -> None:
    """What is well beside a fault is not called wrong: the installation that all of them start from has none."""
    status, findings = bench.examined()

    # none was asked
    assert [(finding.check, finding.severity) for finding in worse(findings)] == [("gate", "note")]
    assert status == 0


def test_settings_that_cannot_be_read_are_a_finding_and_end_with_2(bench: Bench) -> None:
    status, findings = bench.examined("nonsense=1")

    assert [(finding.check, finding.severity) for finding in findings] == [("settings", "error")]
    assert "'nonsense' is not a setting" in findings[0].seen
    assert status == 2


def test_no_secret_is_shown(bench: Bench) -> None:
    asked = ["receipt_mode=memorygate_integrated", "ledger.url=http://ada:hunter2@127.0.0.1:9",
             "ledger.auth_token=hunter2", "api_key=hunter2"]

    _, findings = bench.examined(*asked)

    assert "hunter2" not in str([(finding.seen, finding.cure) for finding in findings])


def test_a_write_ahead_log_that_a_reader_has_let_grow_is_found(bench: Bench) -> None:
    with (contextlib.closing(sqlite3.connect(bench.file)) as reader,
          contextlib.closing(sqlite3.connect(bench.file)) as writer):
        writer.execute("CREATE TABLE ballast (bytes BLOB)")
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM meta").fetchone()
        writer.execute("PRAGMA synchronous = OFF")
        for _ in range(9):
            writer.execute("INSERT INTO ballast VALUES (zeroblob(8388608))")
            writer.commit()

        _, findings = bench.examined()

    [large] = [finding for finding in findings if "write-ahead log" in finding.seen]
    assert large.severity == "warning"
    assert "restart the gate" in large.cure


def test_a_lease_that_a_serving_gate_does_not_take_back_is_an_error(bench: Bench) -> None:
    lost_lease(bench, time.time() - 3600)
    lock = FileLock(str(bench.file))
    try:
        status, findings = bench.examined()
    finally:
        lock.release()

    [stuck] = [finding for finding in findings if "its sweep is stuck" in finding.seen]
    assert (stuck.check, stuck.severity) == ("database", "error")
    assert f"process {os.getpid()} serves" in stuck.seen
    assert "restart the gate" in stuck.cure
    assert status == 1


def test_a_ledger_that_refuses_the_credential_is_found(bench: Bench) -> None:
    with LedgerServer() as ledger:
        asked = ["receipt_mode=memorygate_integrated", f"ledger.url={ledger.url}", "ledger.timeout_ms=30000"]

        _, refused = bench.examined(*asked, f"ledger.auth_token={STRONG}")
        _, taken = bench.examined(*asked, f"ledger.auth_token={ledger.token}")

    [finding] = [finding for finding in refused if finding.check == "ledger"]
    assert (finding.severity, "refuses the gate's credential" in finding.seen) == ("error", True)
    assert "ledger.auth_token" in finding.cure
    assert STRONG not in finding.seen
    assert [finding.severity for finding in taken if finding.check == "ledger"] == ["ok"]


def test_a_receiptgate_that_refuses_the_credential_is_found(bench: Bench) -> None:
    with served(StandIn()) as url:
        asked = ["receipt_mode=receiptgate_integrated", f"ledger.url={url}", "ledger.timeout_ms=30000"]

        _, refused = bench.examined(*asked, f"ledger.auth_token={STRONG}")
        _, taken = bench.examined(*asked, f"ledger.auth_token={KEY}")

    [finding] = [finding for finding in refused if finding.check == "ledger"]
    assert (finding.severity, "refuses the gate's credential" in finding.seen) == ("error", True)
    assert "ledger.auth_token" in finding.cure
    assert [finding.severity for finding in taken if finding.check == "ledger"] == ["ok"]


def test_a_store_of_the_limits_is_well_until_it_is_killed(bench: Bench) -> None:
    limiting = "security.rate_limiting"
    with started() as valkey:
        asked = [f"{limiting}.enabled=true", f"{limiting}.storage=redis", f"{limiting}.redis_url={valkey.url}",
                 f"{limiting}.store_timeout_seconds=30"]
        _, there = bench.examined(*asked)
        valkey.kill()
        _, gone = bench.examined(*asked)

    assert [[finding.severity for finding in findings if finding.check == "limits"] for findings in (there, gone)] == [
        ["ok"], ["warning"]]


@pytest.fixture
def shown() -> Iterator[int]:
    """Return the port of a server with a certificate of an authority that nobody knows."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    plain, _ = listening.accept()
                    with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as secure:
                        secure.recv(1)
        thread = threading.Thread(target=answer)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_certificate_that_callers_refuse_at_the_public_address_is_found(bench: Bench, shown: int) -> None:
    _, findings = bench.examined(options=("--url", f"https://localhost:{shown}"))

    [refused] = [finding for finding in findings if finding.check == "tls"]
    assert (refused.severity, "is refused by callers" in refused.seen) == ("error", True)
    assert "renew the certificate" in refused.cure


def test_a_gate_that_does_not_answer_is_found(bench: Bench) -> None:
    status, findings = bench.examined(options=("--url", NOWHERE))

    [away] = [finding for finding in findings if finding.check == "gate"]
    assert (away.severity, away.seen.startswith("no gate answers at http://127.0.0.1:9")) == ("error", True)
    assert "asyncgate serve" in away.cure
    assert status == 1


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """What stands in the files of a folder, and their rights; the index of a log is not content."""
    return {path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), stat.S_IMODE(path.stat().st_mode))
            for path in folder.iterdir() if path.is_file() and not path.name.endswith("-shm")}


def test_nothing_is_changed_whether_the_file_was_closed_or_its_gate_was_killed(bench: Bench) -> None:
    closed = contents(bench.folder)
    bench.examined()
    assert contents(bench.folder) == closed

    gate = Live(database=f"sqlite:///{bench.file}")
    gate.kill()
    killed = contents(bench.folder)
    _, findings = bench.examined()

    assert contents(bench.folder) == killed
    assert {*killed} == {"gate.db", "gate.db-wal", "gate.db.lock"}
    [note] = [finding for finding in findings if "ended without closing it" in finding.seen]
    assert (note.severity, "asyncgate serve" in note.cure) == ("note", True)


def test_a_healthy_gate_that_runs_has_no_finding(bench: Bench) -> None:
    gate = Live(database=f"sqlite:///{bench.file}")
    bench.patch.setenv("ASYNCGATE_API_KEY", TOKEN)
    try:
        status, findings = bench.examined()
    finally:
        gate.kill()

    assert worse(findings) == []
    assert {"settings", "rights", "disk", "clock", "versions", "database", "gate", "upkeep"} <= {
        finding.check for finding in findings}
    assert status == 0


def test_a_gate_that_does_not_know_the_credential_says_at_least_that_it_is_healthy(bench: Bench) -> None:
    gate = Live(database=f"sqlite:///{bench.file}")
    try:
        _, findings = bench.examined()
    finally:
        gate.kill()

    assert [(finding.severity, finding.cure) for finding in findings if finding.check == "gate"] == [
        ("ok", ""), ("note", "give an operator's credential: --token @FILE, or --profile")]


def test_people_read_lines_with_the_cure_below(bench: Bench) -> None:
    bench.file.chmod(0o644)

    ran = CliRunner().invoke(main, ["doctor", "--database", f"sqlite:///{bench.file}"], prog_name="asyncgate")

    lines = ran.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("error    rights"))
    assert lines[at + 1].split() == ["→", "chmod", "600", str(bench.file)]
    assert lines[-1] == "1 error, 1 note"


def test_json_says_the_worst_severity(bench: Bench) -> None:
    ran = CliRunner().invoke(main, ["doctor", "--json", "--database", f"sqlite:///{bench.file}"],
                             prog_name="asyncgate")

    assert json.loads(ran.stdout)["severity"] == "note"


# The checklist before going live (spec 21.14).


def test_the_checklist_has_every_line_of_the_specification(bench: Bench) -> None:
    _, findings = bench.examined(options=("--production",))

    assert len([finding for finding in findings if finding.check == "production"]) == 18


def test_a_gate_for_trials_is_not_ready_for_production_and_is_told_what_it_lacks(bench: Bench) -> None:
    bench.patch.setenv("ASYNCGATE_API_KEY", STRONG)

    _, findings = bench.examined(options=("--production",))

    cures = " ".join(finding.cure for finding in findings if finding.check == "production"
                     and finding.severity == "warning")
    assert all(setting in cures for setting in (
        "security.tls.certificate_path", "security.rate_limiting.enabled=true", "metrics.enabled=true", "_COMMAND"))


def test_a_gate_that_is_ready_has_only_questions_for_people_left(bench: Bench) -> None:
    bench.patch.delenv("ASYNCGATE_API_KEY")
    bench.patch.setenv("ASYNCGATE_API_KEY_FILE", str(bench.private("key", STRONG)))

    _, findings = bench.examined(f"security.tls.certificate_path={certificate(bench, 60)}", "metrics.enabled=true",
                                 "security.rate_limiting.enabled=true", options=("--production",))

    lines = [finding for finding in findings if finding.check == "production"]
    assert {line.severity for line in lines} == {"ok", "note"}
    assert all(line.cure for line in lines if line.severity == "note")
