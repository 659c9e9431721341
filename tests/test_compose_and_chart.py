"""The compose files and the Helm chart are well formed, name real settings and paths, and agree with the image."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncgate import __version__
from asyncgate.parts.model.settings import Settings, list_settings, load_settings
from asyncgate.parts.operations import OPERATIONS

DEPLOY = Path(__file__).parents[1] / "deploy"
CHART = DEPLOY / "helm" / "asyncgate"
TEMPLATES = sorted((CHART / "templates").iterdir())
SETTINGS = {setting.environment for setting in list_settings(Settings)}
PATHS = {path for op in OPERATIONS.values() for _, path in op.rest}
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SECRETS = {"apiKey": "k" * 32, "databaseUrl": "postgresql://asyncgate_app@db/gate", "migrateUrl": "postgresql://db/gate"}
# What stands alone on its line is for Helm; the rest of a template is YAML as soon as its holes are filled.
ALONE, HOLE = re.compile(r"^\s*\{\{-?[^}]*\}\}\s*$\n?", re.M), re.compile(r"\{\{-?[^}]*\}\}")


def read(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return tree


def environment(service: dict[str, Any]) -> dict[str, str]:
    """The settings of a service, with a word for each password."""
    return {name: re.sub(r"\$\{[^}]*\}", "word", value) for name, value in service["environment"].items()}


# Compose.


@pytest.mark.parametrize("name", ["compose.yaml", "compose.limits.yaml"])
def test_the_gate_accepts_what_a_compose_file_sets(name: str) -> None:
    services = read(name)["services"]
    both = {**environment(read("compose.yaml")["services"]["gate"]), **environment(services["gate"]),
            "ASYNCGATE_TRUSTED_PROXIES": ""}

    assert set(both) <= SETTINGS
    settings = load_settings(environ=both).settings
    assert settings.database.url == "postgresql://asyncgate_app:word@postgres/gate"
    assert settings.security.rate_limiting.enabled is (None if name == "compose.yaml" else True)


def test_a_compose_file_holds_no_secret_and_starts_in_order() -> None:
    text, services = (DEPLOY / "compose.yaml").read_text(), read("compose.yaml")["services"]

    assert re.findall(r"(?:PASSWORD|API_KEY): (?!\$\{\w+:\?)", text) == []
    assert services["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert services["gate"]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
    assert read("compose.limits.yaml")["services"]["gate"]["depends_on"]["valkey"]["condition"] == "service_healthy"


def test_compose_asks_for_readiness_and_waits_longer_than_a_stop_takes() -> None:
    gate, settings = read("compose.yaml")["services"]["gate"], Settings()
    match = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", gate["healthcheck"]["test"][-1])

    assert match
    assert (match[1], match[2]) == (gate["command"][gate["command"].index("--port") + 1], "/ready")
    assert match[2] in PATHS
    assert gate["ports"] == [f"127.0.0.1:{match[1]}:{match[1]}"]
    assert int(gate["stop_grace_period"].removesuffix("s")) > settings.drain_seconds + settings.shutdown_seconds


def test_the_image_has_what_the_compose_files_need() -> None:
    """Valkey is spoken to by a package that a gate does not need by itself."""
    assert re.search(r"^redis==", (DEPLOY.parent / ".ci" / "image.txt").read_text(), re.M)
    dockerfile = (DEPLOY.parent / "Dockerfile").read_text()
    assert "ARG EXTRAS=redis\n" in dockerfile
    assert '".[$EXTRAS]"' in dockerfile


def test_the_role_of_the_gate_is_made_by_a_script_that_a_shell_can_read() -> None:
    script = DEPLOY / "postgres-role.sh"

    subprocess.run(["sh", "-n", script], check=True)

    assert "CREATE ROLE asyncgate_app LOGIN PASSWORD :'password'" in script.read_text()


def has_compose() -> bool:
    return bool(shutil.which("docker")) and subprocess.run(
        ["docker", "compose", "version"], capture_output=True).returncode == 0


@pytest.mark.skipif(not has_compose(), reason="docker compose is not installed")
@pytest.mark.parametrize("more", [[], ["--file", str(DEPLOY / "compose.limits.yaml")]])
def test_docker_compose_reads_the_files(more: list[str]) -> None:
    words = {"ASYNCGATE_API_KEY": "a", "POSTGRES_PASSWORD": "b", "ASYNCGATE_APP_PASSWORD": "c"}

    done = subprocess.run(["docker", "compose", "--file", str(DEPLOY / "compose.yaml"), *more, "config"],
                          capture_output=True, text=True, env={"PATH": "/usr/local/bin:/usr/bin:/bin", **words})

    assert done.returncode == 0, done.stderr


# The chart.


def text_of(template: Path) -> str:
    return re.sub(r"^\s*#.*\n", "", template.read_text(), flags=re.M)


def test_the_chart_is_that_of_this_release() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_a_template_is_well_formed(template: Path) -> None:
    text = text_of(template)
    opened = re.findall(r"\{\{-? *(?:if|with|range|define) ", text)

    assert text.count("{{") == text.count("}}") == len(HOLE.findall(text))
    assert len(opened) == len(re.findall(r"\{\{-? *end *-?\}\}", text))
    if template.suffix == ".yaml":
        read = yaml.safe_load(HOLE.sub("x", ALONE.sub("", text)))
        assert {"apiVersion", "kind", "metadata"} <= read.keys()


def test_every_value_is_used_and_every_used_value_is_there() -> None:
    used = set(re.findall(r"\.Values\.([\w.]+)", "\n".join(map(text_of, TEMPLATES))))

    def leaves(tree: Any, prefix: str = "") -> set[str]:
        named = tree.items() if isinstance(tree, dict) and tree else ()
        return {leaf for key, value in named for leaf in (leaves(value, f"{prefix}{key}.") or {f"{prefix}{key}"})}

    def covered(leaf: str) -> bool:
        return any(leaf == name or leaf.startswith(f"{name}.") for name in used)

    there = leaves(VALUES)
    assert [leaf for leaf in there if not covered(leaf)] == []
    assert [name for name in used if not any(leaf == name or leaf.startswith(f"{name}.") for leaf in there)] == []


def test_the_chart_names_real_settings_and_values_that_the_gate_accepts() -> None:
    named = set(re.findall(r"- name: (ASYNCGATE_\w+)", text_of(CHART / "templates" / "deployment.yaml")))

    assert named | VALUES["settings"].keys() <= SETTINGS
    load_settings(environ={**VALUES["settings"], "ASYNCGATE_DRAIN_SECONDS": str(VALUES["drainSeconds"]),
                           "ASYNCGATE_SHUTDOWN_SECONDS": str(VALUES["shutdownSeconds"])})


def test_pods_take_settings_from_secrets_and_mount_folders_of_the_operator() -> None:
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    deployment, migrate = (text_of(CHART / "templates" / name) for name in ("deployment.yaml", "migrate.yaml"))
    example = set(re.findall(r"#   (ASYNCGATE_\w+):", (CHART / "values.yaml").read_text()))

    assert example
    assert example <= SETTINGS
    assert re.search(r"secretKeyRef:\n +name: \{\{ \$from.name }}\n +key: \{\{ \$from.key }}", deployment)
    for text in (deployment, migrate):
        assert 'include "asyncgate.mounts"' in text
        assert 'include "asyncgate.volumes"' in text
    for line in ("secretName: {{ $file.secret }}", "mountPath: {{ $file.mountPath }}", "name: {{ $file.configMap }}"):
        assert line in helpers


def test_probes_ask_what_the_gate_serves_and_a_pod_has_time_to_drain() -> None:
    text = text_of(CHART / "templates" / "deployment.yaml")
    probes = dict(re.findall(r"(\w+)Probe:\n +httpGet:\n +path: (\S+)", text))

    assert probes == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
    assert {*probes.values()} <= PATHS
    assert "add .Values.preStopSeconds .Values.drainSeconds .Values.shutdownSeconds 5" in text


@pytest.mark.parametrize("name", ["deployment.yaml", "migrate.yaml"])
def test_no_service_of_the_cluster_is_taken_for_a_setting(name: str) -> None:
    """Kubernetes would set ASYNCGATE_PORT for a service named asyncgate, and the gate refuse to start."""
    assert "enableServiceLinks: false" in text_of(CHART / "templates" / name)


@pytest.mark.skipif(not shutil.which("helm"), reason="helm is not installed")
@pytest.mark.parametrize("more", [{}, {"existingSecret": "mine", "migrate": {"enabled": False}, "replicas": 1}])
def test_helm_reads_the_chart(tmp_path: Path, more: dict[str, Any]) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps({**SECRETS, **more}))

    linted = subprocess.run(["helm", "lint", "--strict", "--values", values, CHART], capture_output=True, text=True)
    made = subprocess.run(["helm", "template", "gate", CHART, "--values", values], capture_output=True, text=True)

    assert linted.returncode == 0, linted.stdout
    assert made.returncode == 0, made.stderr
    kinds = {document["kind"] for document in yaml.safe_load_all(made.stdout) if document}
    assert kinds == {"Deployment", "Service", "PodDisruptionBudget"} | (set() if more else {"Secret", "Job"})
