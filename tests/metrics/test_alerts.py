"""Alerts and dashboards: they ask for what is exported and nothing else, and each alert fires when it should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncgate.parts.extras import list_families

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
BOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
OF_THE_LIBRARY = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
SUFFIXES = ("_bucket", "_sum", "_count")

GATE = 'instance="gate:8080"'
TYPE = 'type="demo"'
# For each alert, what Prometheus has seen every minute for an hour, and the label of the alert that then fires.
FIRES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "AsyncGateTasksWaitLong": ({
        f"asyncgate_queue_oldest_seconds{{{TYPE}}}": "0+60x60",
        f"asyncgate_leases_granted_total{{{TYPE}}}": "0+1x60"}, {"type": "demo"}),
    "AsyncGateNobodyTakesTasks": ({
        f"asyncgate_queue_oldest_seconds{{{TYPE}}}": "100x60",
        f"asyncgate_leases_granted_total{{{TYPE}}}": "7x60"}, {"type": "demo"}),
    "AsyncGateTasksStarve": ({f'asyncgate_upkeep_done_total{{{GATE},duty="starvation"}}': "0x40 1x20"}, {}),
    "AsyncGateLeasesExpire": ({
        f'asyncgate_leases_ended_total{{{TYPE},ending="expired"}}': "0+2x60",
        f'asyncgate_leases_ended_total{{{TYPE},ending="completed"}}': "0+8x60"}, {"type": "demo"}),
    "AsyncGateTasksFail": ({
        f'asyncgate_leases_ended_total{{{TYPE},ending="failed"}}': "0+3x60",
        f'asyncgate_leases_ended_total{{{TYPE},ending="completed"}}': "0+7x60"}, {"type": "demo"}),
    "AsyncGateQuestionsWait": ({f"asyncgate_unanswered_oldest_seconds{{{GATE}}}": "90000+60x60"}, {}),
    "AsyncGateLimitStopped": ({
        f'asyncgate_limit_stopped{{{GATE},limit="openai"}}': "1x60",
        f'asyncgate_limit_waiting_tasks{{{GATE},limit="openai"}}': "7x60"}, {"limit": "openai"}),
    "AsyncGateDown": ({f'up{{job="asyncgate",{GATE}}}': "1x30 0x30"}, {"instance": "gate:8080", "job": "asyncgate"}),
    "AsyncGateTasksHeld": ({f"asyncgate_tasks_held_total{{{TYPE}}}": "0x40 1x20"}, {"type": "demo"}),
    "AsyncGateErrors": ({
        f'asyncgate_requests_total{{{GATE},status="5xx"}}': "0+2x60",
        f'asyncgate_requests_total{{{GATE},status="2xx"}}': "0+98x60"}, {"instance": "gate:8080"}),
    "AsyncGateDatabaseFails": ({
        f'asyncgate_database_errors_total{{{GATE},kind="unavailable"}}': "0x46 1x14"}, {"instance": "gate:8080"}),
    "AsyncGateLedgerLags": ({f"asyncgate_ledger_oldest_seconds{{{GATE}}}": "0+60x60"}, {"instance": "gate:8080"}),
    "AsyncGateLedgerDiffers": ({
        f'asyncgate_ledger_differences_total{{{GATE},kind="lost_by_ledger"}}': "0x44 3x15"},
        {"instance": "gate:8080", "kind": "lost_by_ledger"}),
    "AsyncGateSweepLate": ({
        f'asyncgate_upkeep_last_run_timestamp_seconds{{{GATE},duty="sweep"}}': "0x60"}, {"instance": "gate:8080"}),
    "AsyncGateWebhooksParked": ({
        f'asyncgate_webhook_deliveries_total{{{GATE},result="parked"}}': "0x40 1x20"}, {"instance": "gate:8080"}),
    "AsyncGateWebhooksFail": ({
        f'asyncgate_webhook_deliveries_total{{{GATE},result="failed"}}': "0+1x60",
        f'asyncgate_webhook_deliveries_total{{{GATE},result="delivered"}}': "7x60"}, {"instance": "gate:8080"}),
    "AsyncGateWebhooksLate": ({
        f'asyncgate_webhook_delay_seconds_bucket{{{GATE},le="300"}}': "0+8x60",
        f'asyncgate_webhook_delay_seconds_bucket{{{GATE},le="900"}}': "0+10x60",
        f'asyncgate_webhook_delay_seconds_bucket{{{GATE},le="+Inf"}}': "0+10x60"}, {"instance": "gate:8080"}),
}
# What a gate without trouble shows: nothing fires.
QUIET = {
    f"asyncgate_queue_oldest_seconds{{{TYPE}}}": "200x60",
    f"asyncgate_leases_granted_total{{{TYPE}}}": "0+100x60",
    f'asyncgate_leases_ended_total{{{TYPE},ending="completed"}}': "0+99x60",
    f'asyncgate_leases_ended_total{{{TYPE},ending="expired"}}': "0+1x60",
    f'asyncgate_leases_ended_total{{{TYPE},ending="failed"}}': "0+9x60",
    f'up{{job="asyncgate",{GATE}}}': "1x60",
    f"asyncgate_tasks_held_total{{{TYPE}}}": "3x60",
    f"asyncgate_unanswered_oldest_seconds{{{GATE}}}": "0+60x60",
    f'asyncgate_limit_stopped{{{GATE},limit="openai"}}': "1x60",
    f'asyncgate_limit_waiting_tasks{{{GATE},limit="openai"}}': "0x60",
    f'asyncgate_requests_total{{{GATE},status="2xx"}}': "0+1000x60",
    f'asyncgate_requests_total{{{GATE},status="5xx"}}': "0+1x60",
    f'asyncgate_requests_total{{{GATE},operation="ready",status="5xx"}}': "0+60x60",     # it drains
    f'asyncgate_database_errors_total{{{GATE},kind="refused"}}': "0+1x60",
    f"asyncgate_ledger_oldest_seconds{{{GATE}}}": "2x60",
    f'asyncgate_ledger_differences_total{{{GATE},kind="lost_by_ledger"}}': "3x60",
    f'asyncgate_upkeep_last_run_timestamp_seconds{{{GATE},duty="sweep"}}': "0+60x60",
    f'asyncgate_webhook_deliveries_total{{{GATE},result="delivered"}}': "0+100x60",
    f'asyncgate_webhook_deliveries_total{{{GATE},result="failed"}}': "0+9x60",
    f'asyncgate_webhook_deliveries_total{{{GATE},result="parked"}}': "3x60",
    f'asyncgate_webhook_delay_seconds_bucket{{{GATE},le="60"}}': "0+95x60",
    f'asyncgate_webhook_delay_seconds_bucket{{{GATE},le="+Inf"}}': "0+100x60",
}


def rules() -> dict[str, dict[str, Any]]:
    """Return the alerts by their names."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def expressions(board: Path) -> list[str]:
    """Return what the panels of a dashboard ask for."""
    return [target["expr"] for panel in json.loads(board.read_text())["panels"] for target in panel["targets"]]


def exported() -> set[str]:
    """Return the names of all samples that a gate can export."""
    families = list_families()
    histograms = {family.name + suffix for family in families if family.kind == "histogram" for suffix in SUFFIXES}
    return histograms | {family.name for family in families if family.kind != "histogram"} | OF_THE_LIBRARY


def named(expression: str) -> set[str]:
    """Return the metrics that an expression names."""
    return set(re.findall(r"\b(?:asyncgate|process|python)_\w+", expression))


def labelled(expression: str) -> set[tuple[str, str]]:
    """Return the labels by which an expression selects, with the metric that must have each."""
    return {(metric, label) for metric, inside in re.findall(r"\b(asyncgate_\w+)\{([^}]*)\}", expression)
            for label in re.findall(r"(\w+)=", inside)} - {(metric, "instance") for metric in named(expression)}


@pytest.mark.parametrize("name", rules())
def test_an_alert_asks_for_what_is_exported_and_says_what_to_do(name: str) -> None:
    rule = rules()[name]

    assert named(rule["expr"]) <= exported()
    assert set(rule["annotations"]) == {"summary", "action"}
    assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.name)
def test_a_dashboard_asks_for_what_is_exported(board: Path) -> None:
    asked = expressions(board)

    assert len(asked) >= 8
    assert {name for expression in asked for name in named(expression)} <= exported()


def test_every_label_that_is_asked_for_is_one_of_its_metric() -> None:
    labels = {name: set(family.labels) for family in list_families()
              for name in (family.name, *(family.name + suffix for suffix in SUFFIXES))}
    asked = [*(rule["expr"] for rule in rules().values()),
             *(expression for board in BOARDS for expression in expressions(board))]

    assert {(metric, label) for expression in asked for metric, label in labelled(expression)
            if label not in labels[metric]} == set()


def test_no_label_is_one_that_prometheus_sets_itself() -> None:
    assert [family.name for family in list_families() if {"job", "instance"} & set(family.labels)] == []


def test_each_alert_is_shown_to_fire() -> None:
    assert rules().keys() == FIRES.keys()


# By Prometheus itself.


@pytest.fixture
def promtool() -> str:
    """Return Prometheus's own checker."""
    if (program := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    return program


def run(*command: str | Path) -> None:
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr


def test_prometheus_reads_the_rules_and_the_dashboards(promtool: str, tmp_path: Path) -> None:
    asked = [expression.replace("$__rate_interval", "5m") for board in BOARDS for expression in expressions(board)]
    recorded = [{"record": f"asked:{number}", "expr": expression} for number, expression in enumerate(asked)]
    (tmp_path / "asked.yaml").write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": recorded}]}))

    run(promtool, "check", "rules", ALERTS, tmp_path / "asked.yaml")


def expect(name: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    """Return the alert that must fire, with its texts filled in."""
    rule = rules()[name]
    texts = {key: re.sub(r"{{ \$labels\.(\w+) }}", lambda match: labels[match[1]], text)
             for key, text in rule["annotations"].items()}
    return [{"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": texts}]


@pytest.mark.parametrize("name", FIRES)
def test_an_alert_fires_when_it_should_and_not_on_a_gate_without_trouble(
        promtool: str, name: str, tmp_path: Path) -> None:
    seen, labels = FIRES[name]

    def case(series: dict[str, str], expected: list[dict[str, Any]]) -> dict[str, Any]:
        return {"interval": "1m", "input_series": [{"series": name, "values": told} for name, told in series.items()],
                "alert_rule_test": [{"eval_time": "50m", "alertname": name, "exp_alerts": expected}]}
    told = {"rule_files": [str(ALERTS)], "tests": [case(seen, expect(name, labels)), case(QUIET, [])]}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(told))

    run(promtool, "test", "rules", tmp_path / "cases.yaml")
