"""The keys that sign access tokens: which files are refused, and how a running gate follows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from joserfc import jws, jwt

from asyncgate import main
from asyncgate.parts.identity.jwt import Flaw
from asyncgate.parts.identity.signing import KEYS_STALE_SECONDS, SigningKeys, describe_key, name_retired
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.settings import Jwt, SecuritySettings, Settings
from tests.extras.oauth.conftest import write_signing_key

NOW = 1_800_000_000.0


class Clock:
    """A clock that stands until it is moved."""

    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A key that the test may change."""
    return write_signing_key(tmp_path / "signing.pem")


@pytest.fixture
def clock() -> Clock:
    """The clock of the gate."""
    return Clock()


@pytest.fixture
def keys(path: Path, clock: Clock) -> SigningKeys:
    """The keys of a running gate."""
    return SigningKeys(str(path), now=clock, clock=clock)


def load(path: Path | str) -> SigningKeys:
    return SigningKeys.load(Settings(security=SecuritySettings(jwt=Jwt(private_key_path=str(path)))))


def replace_key(path: Path) -> None:
    """Put another key in its place, as a rotation does."""
    os.replace(write_signing_key(path.with_name("next.pem")), path)


def retire(path: Path, keys: SigningKeys, **more: Any) -> None:
    """List the current key among the retired ones."""
    entry = {**describe_key(keys.current.key), "iat": NOW - 60, "exp": NOW + 60, **more}
    Path(name_retired(str(path))).write_text(json.dumps({"keys": [entry]}))


def test_a_signed_token_is_an_access_token_that_the_published_key_verifies(keys: SigningKeys) -> None:
    token = keys.sign({"sub": "ada"})

    [key] = keys.public_keys()
    assert jws.extract_compact(token.encode()).protected == {"alg": "RS256", "typ": "at+jwt", "kid": key.kid}
    assert jwt.decode(token, key).claims == {"sub": "ada"}
    assert {*keys.jwks()["keys"][0]} == {"kty", "n", "e", "kid", "use", "alg"}


def test_a_secret_is_of_one_purpose_and_of_one_key(path: Path, keys: SigningKeys) -> None:
    first = keys.secret("sign-in")

    assert len(first) == 32
    assert first == load(path).secret("sign-in") != keys.secret("refresh")
    replace_key(path)
    assert load(path).secret("sign-in") != first


def test_a_running_gate_notices_a_changed_file_within_five_seconds(
        path: Path, clock: Clock, keys: SigningKeys) -> None:
    before = keys.current.key.kid
    retire(path, keys)
    replace_key(path)

    clock.now += KEYS_STALE_SECONDS - 0.1
    assert keys.current.key.kid == before
    clock.now += 0.1

    assert [key.kid for key in keys.public_keys()] == [keys.current.key.kid, before]
    assert keys.current.key.kid != before


@pytest.mark.anyio
async def test_an_unknown_kid_makes_a_gate_look_at_once(path: Path, keys: SigningKeys) -> None:
    retire(path, keys)
    replace_key(path)
    fresh = load(path).current.key.kid

    assert (await keys.find(fresh)).kid == fresh


@pytest.mark.anyio
async def test_a_retired_key_verifies_until_its_time(path: Path, clock: Clock, keys: SigningKeys) -> None:
    old = keys.current.key.kid
    retire(path, keys)
    replace_key(path)
    keys.look()

    clock.now = NOW + 59
    assert (await keys.find(old)).kid == old
    clock.now = NOW + 60

    with pytest.raises(Flaw, match="kid is unknown"):
        await keys.find(old)
    assert old not in {key["kid"] for key in keys.jwks()["keys"]}


@pytest.mark.parametrize("break_it", [
    lambda path: path.write_text("no key"), lambda path: path.unlink(), lambda path: path.chmod(0o644),
    lambda path: Path(name_retired(str(path))).write_text('{"keys": [{"kty": "RSA"}]}')])
def test_a_running_gate_goes_on_with_its_keys_while_a_file_cannot_be_used(
        path: Path, keys: SigningKeys, break_it: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = keys.current.key.kid
    break_it(path)

    keys.look()
    keys.look()

    assert keys.current.key.kid == before
    assert len(caplog.records) == 1


def write_small(path: Path, bits: int = 1024) -> None:
    small = rsa.generate_private_key(public_exponent=65537, key_size=bits)
    path.write_bytes(small.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                         serialization.NoEncryption()))


def write_public(path: Path) -> None:
    public = serialization.load_pem_private_key(path.read_bytes(), None).public_key()
    path.write_bytes(public.public_bytes(serialization.Encoding.PEM,
                                         serialization.PublicFormat.SubjectPublicKeyInfo))


def publish_private(path: Path) -> None:
    key = load(path).current.key
    entry = {**key.as_dict(private=True), "iat": NOW, "exp": NOW + 60}
    Path(name_retired(str(path))).write_text(json.dumps({"keys": [entry]}))


@pytest.mark.parametrize(("spoil", "why"), [
    (lambda path: path.chmod(0o640), "other users"), (lambda path: path.unlink(), "cannot be read"),
    (write_small, "2048"), (write_public, "no private key"), (publish_private, "public keys only"),
    (lambda path: retire(path, load(path), exp="never"), "iat and exp")])
def test_unsafe_files_refuse_the_start(path: Path, spoil: Any, why: str) -> None:
    spoil(path)

    with pytest.raises(StartupError, match=why):
        load(path)


# The command.


def command(path: Path, name: str, *more: str) -> Any:
    return CliRunner().invoke(main, ["keys", "signing", name, "--file", str(path), *more])


def test_a_made_key_is_its_owners_alone_and_no_file_is_ever_replaced(tmp_path: Path) -> None:
    path = tmp_path / "made.pem"

    made, again = (command(path, "make", "--bits", "2048", *more) for more in ((), ("--json",)))

    assert (made.exit_code, again.exit_code) == (0, 5)
    assert path.stat().st_mode & 0o777 == 0o600
    assert made.stdout.strip() == load(path).current.key.kid
    assert "exists already" in again.stderr


@pytest.mark.parametrize("name", ["make", "rotate"])
def test_a_key_that_the_disk_does_not_take_is_told_with_its_file_and_leaves_nothing(path: Path, name: str) -> None:
    before = path.read_bytes()
    target = path if name == "rotate" else path.with_name("made.pem")
    asked = [sys.executable, "-m", "asyncgate", "keys", "signing", name, "--file", str(target)]

    done = subprocess.run(["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *asked], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (1, f"Error: {target}: File too large\n")
    assert (list(path.parent.iterdir()), path.read_bytes()) == ([path], before)


def test_a_rotation_keeps_the_tokens_of_the_old_key_good(path: Path) -> None:
    running = load(path)
    old, token = running.current.key.kid, running.sign({"sub": "ada"})

    rotated = command(path, "rotate", "--bits", "2048", "--json")
    running.look()

    fresh, retired = running.in_force()
    assert json.loads(rotated.stdout) == {"kid": fresh.key.kid, "retired": old, "overlap_days": 90}
    assert (retired.key.kid, retired.key.is_private) == (old, False)
    assert retired.until == pytest.approx(time.time() + 90 * 86_400, abs=3600)
    assert jwt.decode(token, retired.public).claims == {"sub": "ada"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.name}.retired.json"}


def test_a_rotation_without_overlap_ends_the_old_key_at_once(path: Path) -> None:
    old = load(path).current.key.kid

    assert command(path, "rotate", "--bits", "2048", "--overlap-days", "0").exit_code == 0

    [key] = load(path).public_keys()
    assert key.kid != old


def test_of_two_rotations_at_once_one_is_refused_and_nothing_is_lost(path: Path) -> None:
    before = load(path).current.key.kid
    path.with_name(f"{path.name}.new").touch()

    refused = command(path, "rotate", "--bits", "2048")

    assert (refused.exit_code, "another rotation" in refused.stderr) == (5, True)
    assert [key.kid for key in load(path).public_keys()] == [before]


def test_the_command_shows_what_a_gate_publishes(path: Path) -> None:
    command(path, "rotate", "--bits", "2048")

    assert json.loads(command(path, "show").stdout) == load(path).jwks()


@pytest.mark.parametrize("name", ["rotate", "show"])
def test_the_command_refuses_files_that_a_gate_would_refuse(path: Path, name: str) -> None:
    path.chmod(0o644)

    refused = command(path, name)

    assert (refused.exit_code, "other users" in refused.stderr) == (2, True)


def test_the_command_takes_the_file_of_the_settings(path: Path) -> None:
    named = CliRunner().invoke(main, ["keys", "signing", "show", "--set", f"security.jwt.private_key_path={path}"])
    unnamed = CliRunner().invoke(main, ["keys", "signing", "show"])

    assert json.loads(named.stdout) == load(path).jwks()
    assert (unnamed.exit_code, "--file" in unnamed.stderr) == (2, True)


def test_without_a_key_oauth_refuses_the_start() -> None:
    with pytest.raises(StartupError, match="keys signing make"):
        load("")
