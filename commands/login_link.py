"""`asyncgate login-link`: a one-time link that signs somebody in where there is no identity provider."""

from __future__ import annotations

import getpass
from datetime import UTC, datetime

import click

from asyncgate.commands import calling
from asyncgate.commands.profiles import Connection
from asyncgate.commands.terminal import escape_text
from asyncgate.commands.verdicts import print_answer


@click.command("login-link")
@click.argument("name", required=False)
@click.option("--role", type=click.Choice(["agent", "worker", "admin"]), default="agent", show_default=True,
              help="Role that the person gets.")
@click.option("--scopes", metavar="NAMES", help="Scopes that the person may grant, split by commas; default: those of "
                                                "the role.")
@click.option("--tenant", metavar="NAME", help="Tenant of the person; only an operator may name another than its own.")
@calling.as_json
@calling.add_gate_options
def login_link(at: Connection, name: str | None, role: str, scopes: str | None, tenant: str | None, as_json: bool,
               ) -> None:
    """Make a link that signs somebody in to a gate once, within ten minutes.

    For teams without an identity provider.  NAME is the principal as which the person acts; by default it is your name
    on this machine.  First connect from a program, such as Claude: it opens a page of the gate in a browser.  Then open
    the link in that browser, or type its code on the page.  The running gate must have security.oauth.enabled.
    """
    given = scopes.split(",") if scopes else None
    with calling.connect_to_gate(at) as gate:
        made = gate.call("make_sign_in_link", principal_id=name or getpass.getuser(), role=role, scopes=given,
                         tenant=tenant)
    if not made["link"]:
        raise calling.exit_with(f"OAuth is off at {gate.url}, so nobody can sign in; the setting "
                                "security.oauth.enabled turns it on", calling.EXIT_WRONG)
    minutes = round((datetime.fromisoformat(made["expires_at"]) - datetime.now(UTC)).total_seconds() / 60)
    print_answer(as_json, made, escape_text(made["link"]), f"code {escape_text(made['sign_in_code'])}",
                 escape_text(f"signs in {made['principal_id']} as {made['role']}, once, within {minutes} minutes"))
