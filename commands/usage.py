"""`asyncgate usage`: what a tenant has used, as a table or as CSV."""

from __future__ import annotations

import csv
import sys
from typing import Any, get_args

import click

from asyncgate.clients.http import Http
from asyncgate.commands import calling
from asyncgate.commands.profiles import Connection
from asyncgate.commands.terminal import show_table
from asyncgate.commands.verdicts import print_answer
from asyncgate.parts.model import wire_usage

FIELDS = wire_usage.UsageLine.__struct_fields__


@click.command()
@click.option("--period", type=click.Choice(get_args(wire_usage.Period)), default="month",
              help="What each line sums up.")
@click.option("--since", type=calling.PAST, help="Begin with the period of this time; 90d is 90 days ago.")
@click.option("--until", type=calling.PAST, help="End with the period before this time; default now.")
@click.option("--tenant", metavar="TENANT", help="Of this tenant, by id or name; for the operator.")
@click.option("--all-tenants", is_flag=True, help="Of all tenants; for the operator.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with a head line; times are UTC.")
@calling.as_json
@calling.add_gate_options
def usage(at: Connection, as_csv: bool, as_json: bool, **asked: Any) -> None:
    """Show what a tenant has used: tasks, lease-hours, stored bytes × hours, and calls; and its budgets.

    For admins.  Usage is counted up to now; calls appear up to a minute late.
    """
    body = {name: value for name, value in asked.items() if value}
    with calling.connect_to_gate(at) as gate:
        lines = [line for page in gate.pages("get_usage", **body) for line in page["usage"]]
        if as_json:
            print_answer(True, {"usage": lines})
        elif as_csv:
            table = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
            table.writeheader()
            table.writerows({name: f"{value:f}" if isinstance(value, float) else value for name, value in line.items()}
                            for line in lines)
        else:
            show_table(["tenant"] * bool(body.get("all_tenants")) + wire_usage.UsageReport.columns.split(), lines)
            show_budgets(gate, body)


def show_budgets(gate: Http, body: dict[str, Any]) -> None:
    """Show how much of its budgets a tenant has used; of all tenants nothing."""
    if body.get("all_tenants"):
        return
    report = gate.call("get_budgets", **{name: value for name, value in body.items() if name == "tenant"})
    for budget in report["budgets"]:
        click.echo(
            f"{report['month']}: {budget['percent']:g} % of the budget of {budget['monthly']:,} {budget['quantity']}")
