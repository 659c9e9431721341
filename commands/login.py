"""`asyncgate login`, `logout` and `profiles`: store gates and their credentials in a private file."""

from __future__ import annotations

import os
import sys
from urllib.parse import urlsplit

import click
import msgspec

from asyncgate.clients import http
from asyncgate.commands import calling, profiles
from asyncgate.commands.profiles import DEFAULT_PROFILE, Connection, StoredProfile
from asyncgate.commands.terminal import escape_text, show_table
from asyncgate.commands.verdicts import print_answer


@click.command()
@click.option("--url", help=f"URL of the gate; default ASYNCGATE_URL, else {http.DEFAULT_URL}.")
@click.option("--profile", "name", default=DEFAULT_PROFILE, show_default=True, metavar="NAME",
              help="Name of the profile.")
@click.option("--plain-http", is_flag=True, help="Allow plain HTTP: the credential is sent unencrypted.")
@calling.as_json
def login(url: str | None, name: str, plain_http: bool, as_json: bool) -> None:
    """Store the URL of a gate and a credential, so that other commands need neither.

    The command prompts for the credential, or reads it from standard input if that is not a terminal, checks it, and
    stores it in a file that only you can read.  Every command then uses the profile named default, unless
    ASYNCGATE_URL or ASYNCGATE_API_KEY is set; --profile NAME or ASYNCGATE_PROFILE choose another.
    """
    try:
        url = http.root_of(url or os.environ.get("ASYNCGATE_URL") or http.DEFAULT_URL)
        if not http.is_private(http.split_url(url)) and not plain_http:
            raise ValueError(f"{url} is plain HTTP, so others on the network could read the credential: use https://, "
                             "or --plain-http on a private network")
        kept = profiles.read_profiles()
    except ValueError as wrong:
        raise calling.exit_with(str(wrong), calling.EXIT_WRONG) from None
    if plain_http:
        os.environ["ASYNCGATE_PLAIN_HTTP"] = "true"
    token = read_credential(url)
    who = check_credential(url, token)
    profiles.write_profiles({**kept, name: StoredProfile(url, token, plain_http)})
    print_answer(as_json, {"profile": name, "url": url, "file": str(profiles.profiles_file()), **who},
        f"{url} accepts you as {who['principal']}, role {who['role']}; "
        f"saved as profile {name} in {profiles.profiles_file()}")


def read_credential(url: str) -> str:
    """Return the credential from a prompt, or from standard input if it is piped."""
    if sys.stdin.isatty():
        return str(click.prompt(f"Credential for {urlsplit(url).netloc}", hide_input=True, default="",
                                show_default=False, err=True)).strip()
    return sys.stdin.read().strip()


def check_credential(url: str, token: str) -> dict[str, str]:
    """Check that a gate accepts a credential; return its principal and role."""
    with calling.connect_to_gate(Connection(url, token)) as gate:
        you = gate.call("whoami")
    who = f"{you['principal_kind']} {you['principal_id']}" if you.get("bound") else "any principal that a request names"
    return {"principal": escape_text(who), "role": escape_text(str(you["role"]))}


@click.command()
@click.option("--profile", "name", default=DEFAULT_PROFILE, show_default=True, metavar="NAME",
              help="Profile to remove.")
@calling.as_json
def logout(name: str, as_json: bool) -> None:
    """Remove a profile; its credential stays valid until `asyncgate revoke-key` revokes it."""
    kept = load_profiles()
    if kept.pop(name, None) is None:
        raise calling.exit_with(f"there is no profile {name!r}{profiles.format_others(kept)}", calling.EXIT_NOT_FOUND)
    profiles.write_profiles(kept)
    print_answer(as_json, {"profile": name}, f"profile {name} is removed")


@click.command("profiles")
@calling.as_json
def list_profiles(as_json: bool) -> None:
    """List the stored profiles, without their credentials."""
    rows = [{"profile": name, "url": profile.url, "credential": "yes" if profile.token else "none"}
            for name, profile in sorted(load_profiles().items())]
    if as_json:
        return click.echo(msgspec.json.encode({"profiles": rows}))
    if not rows:
        return click.echo("no profiles; `asyncgate login` creates one")
    show_table(["profile", "url", "credential"], rows)


def load_profiles() -> dict[str, StoredProfile]:
    """Return the profiles, or exit with an error."""
    try:
        return profiles.read_profiles()
    except ValueError as wrong:
        raise calling.exit_with(str(wrong), calling.EXIT_WRONG) from None
