"""Settings: which there are, where they come from, who wins, and what a wrong one is told (spec 19)."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any

import pytest

from asyncgate.parts.extras import find_extras
from asyncgate.parts.model.cards import CARDS
from asyncgate.parts.model.settings import (
    Configured,
    Setting,
    Settings,
    SettingsError,
    list_idle,
    list_settings,
    list_values,
    load_settings,
)
from asyncgate.parts.operating.retention import KEPT
from tests.support.each import each

Load = Callable[..., Configured]

SPEC_19 = {
    "default_lease_ttl_seconds": 300,
    "max_lease_ttl_seconds": 1800,
    "lease_sweep_interval_seconds": 10,
    "lease_grace_seconds": 0,
    "default_max_attempts": 3,
    "default_retry_backoff_seconds": 30,
    "max_retry_backoff_seconds": 900,
    "default_priority": 0,
    "default_list_limit": 50,
    "max_list_limit": 200,
    "default_bootstrap_max_items": 50,
    "max_bootstrap_max_items": 200,
    "receipt_retention_days": 30,
    "task_retention_days": 30,
    "api_key": "",
    "allow_insecure_dev": False,
    "default_fallback_owner_kind": "system",
    "default_fallback_owner_id": "asyncgate",
}

STANDALONE = """
receipt_mode: standalone
database:
  url: postgresql://asyncgate:pass@localhost/asyncgate
  tasks: asyncgate.db
  leases: asyncgate.db
  receipts: asyncgate.db
"""
INTEGRATED = """
receipt_mode: memorygate_integrated
database:
  url: postgresql://asyncgate:pass@localhost/asyncgate
  tasks: asyncgate.db       # local operational store
  leases: asyncgate.db      # local operational store
  receipts: memorygate      # canonical receipt ledger

memorygate:
  url: https://memorygate.local
  auth_token_env: MEMORYGATE_TOKEN
  tenant_id: ${TENANT_ID}
  emission_retry:
    buffer_size: 10000
    retry_interval_seconds: 30
    max_retries: 10
"""
COMPLETE = """
# config.yaml
asyncgate:
  instance_id: asyncgate-1

  receipt_mode: memorygate_integrated  # or 'standalone'

  database:
    url: postgresql://asyncgate:pass@localhost/asyncgate
    pool_size: 20

  memorygate:  # only used if receipt_mode = memorygate_integrated
    url: https://memorygate.local
    auth_token_env: MEMORYGATE_TOKEN
    tenant_id: tenant-123
    emission_timeout_ms: 500
    emission_retry:
      buffer_size: 10000
      retry_interval_seconds: 30
      max_retries: 10

  worker_bootstrap:
    include_memorygate_routing: true  # add receipt_routing to bootstrap

  # Failure mode: "eventual" (default) or "strict"
  receipt_consistency_mode: eventual
"""
TIMEOUT = """
memorygate:
  emission_timeout_ms: 500
  failure_mode: "eventual"  # or "strict"
"""
SECURITY = """
security:
  jwt:
    algorithm: RS256
    private_key_path: /secrets/jwt_private.pem
    public_key_path: /secrets/jwt_public.pem
    access_token_ttl_days: 30
    refresh_token_ttl_days: 90

  oauth:
    enabled: true
    providers:
      - name: google
        client_id: ${GOOGLE_CLIENT_ID}
        client_secret: ${GOOGLE_CLIENT_SECRET}
        discovery_url: https://accounts.google.com/.well-known/openid-configuration

  api_keys:
    hash_algorithm: argon2id
    hash_time_cost: 2
    hash_memory_cost: 65536
    hash_parallelism: 1

  rate_limiting:
    enabled: true
    storage: redis
    redis_url: ${REDIS_URL}
    default_tier: free

  audit_logging:
    enabled: true
    retention_days: 90
    sensitive_fields: [password, token, api_key]
"""
RATES = """
rate_limits:
  free_tier:
    tasks_per_hour: 100
    concurrent_leases: 10
    api_calls_per_hour: 1000
    receipt_storage_gb: 1

  paid_tier:
    tasks_per_hour: 10000
    concurrent_leases: 100
    api_calls_per_hour: 100000
    receipt_storage_gb: 10

  enterprise_tier:
    tasks_per_hour: -1  # unlimited
    concurrent_leases: -1
    api_calls_per_hour: -1
    receipt_storage_gb: -1
"""
ROUTING = """
memorygate:
  url: https://memorygate/v1/receipts
  timeout_ms: 500
  failure_mode: "eventual"
"""
HARDENED = """
# Enable unbucketed bootstrap
bootstrap:
  use_obligations_endpoint: true
  deprecate_legacy_endpoint: true

# Enforce size limits
receipts:
  max_body_size_bytes: 65536
  max_parents: 10
  max_artifacts: 100

# Lease/retry separation
leases:
  requeue_on_expiry_no_increment: true
"""

SECRETS = {
    "TENANT_ID": "tenant-7",
    "GOOGLE_CLIENT_ID": "google-client",
    "GOOGLE_CLIENT_SECRET": "hush",
    "REDIS_URL": "redis://localhost:6379/0",
}
POSTGRES = "postgresql://asyncgate:pass@localhost/asyncgate"
RETRY = {
    "ledger.emission_retry.buffer_size": 10000,
    "ledger.emission_retry.retry_interval_seconds": 30,
    "ledger.emission_retry.max_retries": 10,
}
LEDGER = {
    "receipt_mode": "memorygate_integrated",
    "database.url": POSTGRES,
    "ledger.url": "https://memorygate.local",
    "ledger.auth_token_env": "MEMORYGATE_TOKEN",
    **RETRY,
}
ONE_CONSISTENCY = {"receipt_consistency_mode": "eventual"}
ONE_TIMEOUT = {"ledger.timeout_ms": 500}
STORES = {"database.tasks": "asyncgate.db", "database.leases": "asyncgate.db"}
TIERS = {
    f"rate_limits.{tier}_tier.{limit}": amount
    for tier, amounts in {"free": (100, 10, 1000, 1), "paid": (10000, 100, 100000, 10), "enterprise": (-1,) * 4}.items()
    for limit, amount in zip(
        ("tasks_per_hour", "concurrent_leases", "api_calls_per_hour", "receipt_storage_gb"), amounts, strict=True
    )
}

EXAMPLES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "20.2 standalone": (
        STANDALONE,
        {"receipt_mode": "standalone", "database.url": POSTGRES, "database.receipts": "asyncgate.db", **STORES},
    ),
    "20.2 integrated": (
        INTEGRATED,
        {**LEDGER, **STORES, "database.receipts": "memorygate", "ledger.tenant_id": "tenant-7"},
    ),
    "20.12": (TIMEOUT, {**ONE_TIMEOUT, **ONE_CONSISTENCY}),
    "20.14": (
        COMPLETE,
        {
            **LEDGER,
            **ONE_TIMEOUT,
            **ONE_CONSISTENCY,
            "instance_id": "asyncgate-1",
            "database.pool_size": 20,
            "ledger.tenant_id": "tenant-123",
            "worker_bootstrap.include_memorygate_routing": True,
        },
    ),
    "21.10.1": (
        SECURITY,
        {
            "security.jwt.algorithm": "RS256",
            "security.jwt.private_key_path": "/secrets/jwt_private.pem",
            "security.jwt.public_key_path": "/secrets/jwt_public.pem",
            "security.jwt.access_token_ttl_days": 30,
            "security.jwt.refresh_token_ttl_days": 90,
            "security.oauth.enabled": True,
            "security.api_keys.hash_algorithm": "argon2id",
            "security.api_keys.hash_time_cost": 2,
            "security.api_keys.hash_memory_cost": 65536,
            "security.api_keys.hash_parallelism": 1,
            "security.rate_limiting.enabled": True,
            "security.rate_limiting.storage": "redis",
            "security.rate_limiting.redis_url": "redis://localhost:6379/0",
            "security.rate_limiting.default_tier": "free",
            "security.audit_logging.enabled": True,
            "security.audit_logging.retention_days": 90,
            "security.audit_logging.sensitive_fields": ("password", "token", "api_key"),
        },
    ),
    "21.10.2": (RATES, TIERS),
    "H.6": (ROUTING, {"ledger.url": "https://memorygate/v1/receipts", **ONE_TIMEOUT, **ONE_CONSISTENCY}),
    "PH.9": (
        HARDENED,
        {
            "bootstrap.use_obligations_endpoint": True,
            "bootstrap.deprecate_legacy_endpoint": True,
            "receipts.max_body_size_bytes": 65536,
            "receipts.max_parents": 10,
            "receipts.max_artifacts": 100,
            "leases.requeue_on_expiry_no_increment": True,
        },
    ),
}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load settings from the text of a file, an environment and flags; nothing comes from this process."""

    def loading(text: str = "", environ: Mapping[str, str] | None = None, **flags: str) -> Configured:
        path = tmp_path / "gate.yaml"
        path.write_text(text, encoding="utf-8")
        dotted = {name.replace("__", "."): value for name, value in flags.items()}
        return load_settings(str(path) if text else None, environ or {}, dotted)

    return loading


def value(configured: Configured, name: str) -> Any:
    return attrgetter(name)(configured.settings)


def refusal(load: Load, text: str = "", environ: Mapping[str, str] | None = None, **flags: str) -> str:
    with pytest.raises(SettingsError) as raised:
        load(text, environ, **flags)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# What there is


@pytest.mark.parametrize(("name", "default"), SPEC_19.items())
def test_every_default_of_spec_19_has_its_value_under_its_own_name(load: Load, name: str, default: Any) -> None:
    configured = load()

    assert value(configured, name) == default
    assert configured.origins[name] == "default"


def test_every_setting_has_a_short_description_and_says_what_it_takes() -> None:
    for setting in list_settings(Settings):
        assert 0 < len(setting.says) <= 100, setting.name
        assert "\n" not in setting.says
        assert setting.kind, setting.name


def test_every_number_has_a_range() -> None:
    numbers = [setting for setting in list_settings(Settings) if type(setting.default) in (int, float)]

    assert numbers
    assert [setting.name for setting in numbers if " from " not in setting.kind] == []


def test_no_two_settings_share_a_name_in_the_environment() -> None:
    names = [setting.environment for setting in list_settings(Settings)]

    assert len(set(names)) == len(names)
    assert not {"ASYNCGATE_CONFIG", "ASYNCGATE_URL", "ASYNCGATE_API_KEY_FILE"}.intersection(names)
    assert not [name for name in names if name.startswith("ASYNCGATE_TEST_")]


def test_the_engine_reads_plain_values(load: Load) -> None:
    configured = load()

    for setting in list_settings(Settings):
        assert type(value(configured, setting.name)) in (int, float, str, bool, tuple, NoneType), setting.name


def test_an_empty_configuration_is_the_declared_defaults(load: Load) -> None:
    assert load().settings == Settings()


# The file


@pytest.mark.parametrize("clause", EXAMPLES)
def test_an_example_of_the_spec_sets_what_it_names_and_nothing_else(load: Load, clause: str) -> None:
    text, expected = EXAMPLES[clause]

    configured = load(text, SECRETS)

    assert {name: value(configured, name) for name in expected} == expected
    named = {name for name, origin in configured.origins.items() if origin.startswith("file ")}
    assert named - {"security.oauth.providers"} == set(expected)


def test_variables_expand_inside_the_identity_providers_of_21_10_1(load: Load) -> None:
    (google,) = load(SECURITY, SECRETS).settings.security.oauth.providers

    assert (google.name, google.client_id, google.client_secret) == ("google", "google-client", "hush")
    assert google.discovery_url == "https://accounts.google.com/.well-known/openid-configuration"


def test_a_variable_expands_in_the_middle_of_a_value_and_as_a_number(load: Load) -> None:
    text = "database: {url: 'postgresql://${USER}:${PASSWORD}@db/gate'}\nport: ${PORT}"

    configured = load(text, {"USER": "ann", "PASSWORD": "${USER}", "PORT": "9000"})

    assert configured.settings.database.url == "postgresql://ann:${USER}@db/gate"  # what came in is not expanded again
    assert configured.settings.port == 9000


@pytest.mark.parametrize(
    ("text", "name", "variable"),
    [
        (INTEGRATED, "memorygate.tenant_id", "TENANT_ID"),
        (SECURITY, "security.oauth.providers", "GOOGLE_CLIENT_ID"),
        ("environment: a-${}-b", "environment", ""),
        ("allowed_hosts: ['${HOST_NAME}']", "allowed_hosts", "HOST_NAME"),
    ],
)
def test_a_missing_variable_stops_the_start_naming_it_and_its_setting(
    load: Load, text: str, name: str, variable: str
) -> None:
    message = refusal(load, text)

    assert message.startswith(f"{name}: the environment variable {variable!r} is not set (file ")


@pytest.mark.parametrize("text", ["port: 9000", "asyncgate:\n  port: 9000"])
def test_a_file_may_wrap_everything_in_one_key(load: Load, text: str) -> None:
    assert load(text).settings.port == 9000


def test_a_key_beside_the_wrapper_is_refused(load: Load) -> None:
    assert "'asyncgate.port' is not a setting" in refusal(load, "asyncgate: {port: 9000}\nhost: 0.0.0.0")


@pytest.mark.parametrize("text", [
    "# nothing yet\n", "asyncgate:\n", "database:\nmemorygate: {}\n", "ledger: {}\nmemorygate:\n"])
def test_a_file_or_group_with_nothing_in_it_changes_nothing(load: Load, text: str) -> None:
    assert load(text).settings == Settings()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("prot: 1", "'prot' is not a setting (file "),
        ("prot: 1", "did you mean port?"),
        ("database: {urll: 'sqlite:///x.db'}", "did you mean database.url?"),
        ("databse: {url: 'sqlite:///x.db'}", "did you mean database.url?"),
        ("database: sqlite:///x.db", "'database' is not a setting"),
        ("nonsense: {}", "'nonsense' is not a setting"),
        ("port: {number: 1}", "'port.number' is not a setting"),
        ("8080: true", "'8080' is not a setting"),
        ("[port, 8080]", "the file must hold names with values"),
    ],
)
def test_a_name_that_is_no_setting_stops_the_start(load: Load, text: str, hint: str) -> None:
    assert hint in refusal(load, text)


@pytest.mark.parametrize(
    "text",
    [
        "port: 1\nport: 2\n",
        "database:\n  pool_size: 1\n  pool_size: 2\n",
        "security: {oauth: {providers: [{name: a, name: b, client_id: c}]}}\n",
        "leases: {}\nport: 1\nleases: {}\n",
    ],
)
def test_a_key_that_stands_twice_in_one_mapping_is_refused_with_its_line(load: Load, text: str) -> None:
    message = refusal(load, text)

    assert "is set twice (file " in message
    assert "line " in message


def test_a_setting_spelled_both_ways_in_one_file_must_agree(load: Load) -> None:
    assert "database.pool_size: given twice" in refusal(load, "database.pool_size: 1\ndatabase: {pool_size: 2}")


@pytest.mark.parametrize("text", ["port: [1", "port: !!python/name:os.system x", "instance_id: 2020-13-45", "a: *b"])
def test_a_file_that_is_no_yaml_is_refused_in_one_line(load: Load, text: str) -> None:
    assert "(file " in refusal(load, text)


def test_a_broken_file_does_not_spill_the_text_around_the_mistake(load: Load) -> None:
    message = refusal(load, 'api_key: "open-sesame\n')

    assert "line" in message
    assert "open-sesame" not in message


def test_a_file_that_cannot_be_read_is_refused_with_its_path(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"instance_id: caf\xe9")

    for path in (tmp_path / "absent.yaml", tmp_path, latin):
        with pytest.raises(SettingsError, match="cannot be read") as raised:
            load_settings(str(path), {})
        assert str(path) in str(raised.value)


def test_a_value_of_another_yaml_type_is_refused_rather_than_guessed(load: Load) -> None:
    assert refusal(load, "instance_id: 7").startswith("instance_id: 7 is not ")
    assert refusal(load, "port: true").startswith("port: True is not a whole number")
    assert refusal(load, "port: 80.0").startswith("port: 80.0 is not a whole number")
    assert refusal(load, "progress_receipts: 1").startswith("progress_receipts: 1 is not true or false")
    assert refusal(load, "port:").startswith("port: None is not a whole number")


# Who wins


def test_the_last_of_default_file_environment_and_flag_wins_and_is_named(load: Load) -> None:
    text, environ, flags = "port: 1001", {"ASYNCGATE_PORT": "1002"}, {"port": "1003"}

    by_default, by_file = load(), load(text)
    by_environment, by_flag = load(text, environ), load(text, environ, **flags)

    assert [configured.settings.port for configured in (by_default, by_file, by_environment, by_flag)] == [8080, 1001,
                                                                                                           1002, 1003]
    assert by_default.origins["port"] == "default"
    assert by_file.origins["port"].startswith("file ")
    assert by_file.origins["port"].endswith("gate.yaml")
    assert by_environment.origins["port"] == "environment ASYNCGATE_PORT"
    assert by_flag.origins["port"] == "flag --port"


def test_layers_mix_setting_by_setting_even_inside_a_group(load: Load) -> None:
    configured = load(
        "database: {url: 'sqlite:///file.db', pool_size: 3}", {"ASYNCGATE_DATABASE_URL": "memory://"}, port="0"
    )

    assert (configured.settings.database.url, configured.settings.database.pool_size) == ("memory://", 3)
    assert configured.settings.port == 0


def test_a_flag_reaches_into_a_group_by_its_dotted_name(load: Load) -> None:
    configured = load(ledger__emission_retry__max_retries="3")

    assert configured.settings.ledger.emission_retry.max_retries == 3
    assert configured.origins["ledger.emission_retry.max_retries"] == "flag --ledger.emission_retry.max_retries"


def test_the_environment_names_the_file_unless_a_flag_does(tmp_path: Path) -> None:
    first, second = tmp_path / "one.yaml", tmp_path / "other.yaml"
    first.write_text("port: 1001")
    second.write_text("port: 1002")
    environ = {"ASYNCGATE_CONFIG": str(first)}

    assert load_settings(None, environ).settings.port == 1001
    assert load_settings(str(second), environ).settings.port == 1002


@each("setting", list_settings(Settings))
def test_every_setting_is_reached_by_its_name_in_the_environment(load: Load, setting: Any) -> None:
    row = {name: text for name, text, _ in list_values(load())}

    configured = load(environ={setting.environment: row[setting.name]})

    assert value(configured, setting.name) == setting.default
    assert configured.origins[setting.name] == f"environment {setting.environment}"


FLY = {
    "DEFAULT_LEASE_TTL_SECONDS": "120",
    "LEASE_SWEEP_INTERVAL_SECONDS": "5",
    "DEFAULT_MAX_ATTEMPTS": "2",
    "DEFAULT_RETRY_BACKOFF_SECONDS": "15",
    "DEFAULT_BOOTSTRAP_MAX_ITEMS": "50",
    "ALLOW_INSECURE_DEV": "true",
}


def test_the_unprefixed_names_of_19_2_and_19_8_are_read(load: Load) -> None:
    configured = load(environ=FLY)

    assert {name: float(value(configured, name.lower())) for name in FLY} == {
        "DEFAULT_LEASE_TTL_SECONDS": 120,
        "LEASE_SWEEP_INTERVAL_SECONDS": 5,
        "DEFAULT_MAX_ATTEMPTS": 2,
        "DEFAULT_RETRY_BACKOFF_SECONDS": 15,
        "DEFAULT_BOOTSTRAP_MAX_ITEMS": 50,
        "ALLOW_INSECURE_DEV": True,
    }
    assert configured.origins["default_max_attempts"] == "environment DEFAULT_MAX_ATTEMPTS"


SPEC_19 = {
    "DEFAULT_LEASE_TTL_SECONDS": 301, "MAX_LEASE_TTL_SECONDS": 1801, "LEASE_SWEEP_INTERVAL_SECONDS": 11,
    "LEASE_GRACE_SECONDS": 5, "DEFAULT_MAX_ATTEMPTS": 4, "DEFAULT_RETRY_BACKOFF_SECONDS": 31,
    "MAX_RETRY_BACKOFF_SECONDS": 901, "DEFAULT_PRIORITY": 1, "DEFAULT_LIST_LIMIT": 51, "MAX_LIST_LIMIT": 201,
    "DEFAULT_BOOTSTRAP_MAX_ITEMS": 51, "MAX_BOOTSTRAP_MAX_ITEMS": 201, "DEFAULT_FALLBACK_OWNER_KIND": "service",
    "DEFAULT_FALLBACK_OWNER_ID": "lost-and-found"}


def test_every_name_of_section_19_is_read_without_a_prefix(load: Load) -> None:
    configured = load(environ={name: str(given) for name, given in SPEC_19.items()})

    assert {name: value(configured, name.lower()) for name in SPEC_19} == SPEC_19


def test_the_variables_of_the_familys_deployments_are_read_or_told_of(load: Load) -> None:
    idle = {"ASYNCGATE_METAGATE_ENDPOINT": "https://metagate.example", "ASYNCGATE_METAGATE_API_KEY": "hunter2",
            "ASYNCGATE_METAGATE_COMPONENT_KEY": "asyncgate", "ASYNCGATE_METAGATE_BOOTSTRAP_TIMEOUT_SECONDS": "5.0",
            "ASYNCGATE_DEBUG": "false", "ASYNCGATE_RECEIPTGATE_EMISSION_BUFFER_PATH": ".asyncgate/buffer.json",
            "ASYNCGATE_RATE_LIMIT_DEFAULT_CALLS": "100", "ASYNCGATE_RATE_LIMIT_DEFAULT_WINDOW_SECONDS": "60",
            "ASYNCGATE_CORS_ALLOW_CREDENTIALS": "true", "ASYNCGATE_CORS_ALLOWED_METHODS": '["GET"]',
            "ASYNCGATE_CORS_ALLOWED_HEADERS": '["Authorization"]'}
    configured = load(environ={
        **idle, "ASYNCGATE_ENV": "staging", "ASYNCGATE_RATE_LIMIT_ENABLED": "true",
        "ASYNCGATE_RATE_LIMIT_BACKEND": "redis",
        "ASYNCGATE_REDIS_URL": "redis://redis:6379/0", "ASYNCGATE_JWT_PRIVATE_KEY_PATH": "/keys/private.pem",
        "ASYNCGATE_JWT_ALGORITHM": "RS256", "ASYNCGATE_CORS_ALLOWED_ORIGINS": '["https://app.example"]',
        "RECEIPTGATE_API_KEY": "secret"})

    settings = configured.settings
    assert (settings.environment, settings.allowed_origins) == ("staging", ("https://app.example",))
    limiting = settings.security.rate_limiting
    assert (limiting.enabled, limiting.storage, limiting.redis_url) == (True, "redis", "redis://redis:6379/0")
    assert settings.security.jwt.private_key_path == "/keys/private.pem"
    assert settings.ledger.auth_token == "secret"
    told = list_idle(configured)
    assert {line.split()[0] for line in told} == idle.keys()
    assert all("has no effect" in line and "hunter2" not in line for line in told)


def test_an_unprefixed_name_yields_to_the_prefixed_one(load: Load) -> None:
    configured = load(environ={"DEFAULT_MAX_ATTEMPTS": "not even read", "ASYNCGATE_DEFAULT_MAX_ATTEMPTS": "5"})

    assert configured.settings.default_max_attempts == 5
    assert configured.origins["default_max_attempts"] == "environment ASYNCGATE_DEFAULT_MAX_ATTEMPTS"


def test_no_other_name_counts_without_its_prefix(load: Load) -> None:
    assert load(environ={"PORT": "1", "HOST": "elsewhere", "API_KEY": "x"}).settings == Settings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gate.example,  gate.test ", ("gate.example", "gate.test")),
        ('["gate.example", "a,b"]', ("gate.example", "a,b")),
        ("gate.example", ("gate.example",)),
        ("", ()),
        ("[]", ()),
    ],
)
def test_a_list_is_split_by_commas_or_read_as_json(load: Load, text: str, expected: tuple[str, ...]) -> None:
    assert load(environ={"ASYNCGATE_ALLOWED_HOSTS": text}).settings.allowed_hosts == expected
    assert load(allowed_origins=text).settings.allowed_origins == expected


def test_identity_providers_are_json_in_the_environment(load: Load) -> None:
    text = '[{"name": "hub", "client_id": "gate"}]'

    (hub,) = load(environ={"ASYNCGATE_SECURITY_OAUTH_PROVIDERS": text}).settings.security.oauth.providers

    assert (hub.name, hub.client_id, hub.client_secret) == ("hub", "gate", "")


def test_a_choice_may_be_written_in_any_case(load: Load) -> None:
    assert load(environ={"ASYNCGATE_LOG_LEVEL": "INFO"}).settings.log_level == "info"


@pytest.mark.parametrize("variable", ["ASYNCGATE_URL", "ASYNCGATE_TEST_PG_URL", "ASYNCGATEWAY", "asyncgate_port"])
def test_names_that_are_not_the_gates_own_are_ignored(load: Load, variable: str) -> None:
    assert load(environ={variable: "anything"}).settings == Settings()


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("ASYNCGATE_PROT", "; did you mean ASYNCGATE_PORT?"),
        ("ASYNCGATE_DB_URL", "; did you mean ASYNCGATE_DATABASE_URL?"),
        ("ASYNCGATE_XYZZY", ""),
    ],
)
def test_an_unknown_name_of_ours_in_the_environment_stops_the_start(load: Load, variable: str, hint: str) -> None:
    message = refusal(load, environ={variable: "1"})

    assert message == f"'{variable}' is not a setting (environment {variable}){hint}"


def test_an_unknown_flag_stops_the_start(load: Load) -> None:
    message = refusal(load, databse__url="memory://")

    assert message == "'databse.url' is not a setting (flag --databse.url); did you mean database.url?"


# What is refused


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("port", "-1", "65536"),
        ("default_lease_ttl_seconds", "0", "604801"),
        ("max_claim_tasks", "0", "1001"),
        ("security.jwt.access_token_ttl_days", "4", "91"),
        ("lease_sweep_interval_seconds", "0", "86401"),
        ("rate_limits.paid_tier.tasks_per_hour", "-2", "9007199254740992"),
    ],
)
@pytest.mark.parametrize("layer", ["file", "environment", "flag"])
def test_a_value_out_of_range_is_refused_in_every_layer(load: Load, layer: str, name: str, low: str, high: str) -> None:
    (setting,) = [setting for setting in list_settings(Settings) if setting.name == name]
    given: dict[str, Callable[[str], str]] = {
        "file": lambda text: refusal(load, f"{name}: {text}"),
        "environment": lambda text: refusal(load, environ={setting.environment: text}),
        "flag": lambda text: refusal(load, "", {}, **{name.replace(".", "__"): text}),
    }

    for text in (low, high):
        message = given[layer](text)

        assert message.startswith(f"{name}: ")
        assert setting.kind in message
        assert f"({layer} " in message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", "eighty"),
        ("port", ""),
        ("port", "80.5"),
        ("expiry_jitter_seconds", "nan"),
        ("expiry_jitter_seconds", "inf"),
        ("progress_receipts", "perhaps"),
        ("locatability", "loose"),
        ("receipt_mode", "integrated"),
        ("host", ""),
        ("instance_id", "two words"),
        ("instance_id", "x" * 101),
        ("default_tenant_id", "default"),
        ("default_tenant_id", "00000000-0000-0000-0000-00000000000"),
        ("default_tenant_id", "00000000-0000-0000-0000-000000000000\n"),
        ("default_tenant_id", "{00000000-0000-0000-0000-000000000000}"),
        ("database.url", ""),
        ("database.url", "asyncgate.db"),
        ("allowed_hosts", "[1]"),
        ("allowed_hosts", '["a"'),
        ("security.oauth.providers", "google"),
        ("security.oauth.providers", '[{"name": "google"}]'),
        ("security.oauth.providers", '[{"name": "google", "client_id": "a", "clientsecret": "b"}]'),
        ("security.jwt.algorithm", "HS256"),
        ("security.api_keys.hash_algorithm", "md5"),
        ("security.audit_logging.retention_days", "89"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_the_kind_it_takes(load: Load, name: str, text: str) -> None:
    (setting,) = [setting for setting in list_settings(Settings) if setting.name == name]

    message = refusal(load, environ={setting.environment: text})

    assert message.startswith(f"{name}: ")
    assert setting.kind in message
    assert message.endswith(f"(environment {setting.environment})")


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("default_lease_ttl_seconds", "max_lease_ttl_seconds"),
        ("default_retry_backoff_seconds", "max_retry_backoff_seconds"),
        ("default_list_limit", "max_list_limit"),
        ("default_bootstrap_max_items", "max_bootstrap_max_items"),
    ],
)
def test_a_default_above_its_ceiling_is_refused_naming_both(load: Load, low: str, high: str) -> None:
    message = refusal(load, f"{low}: 11", {f"ASYNCGATE_{high.upper()}": "10"})

    assert message.startswith(f"{low}: 11 is more than {high}, which is 10 (file ")
    assert f"environment ASYNCGATE_{high.upper()})" in message
    assert value(load(**{low: "10", high: "10"}), low) == 10


def test_a_lost_lease_can_not_be_made_to_cost_an_attempt(load: Load) -> None:
    message = refusal(load, "leases: {requeue_on_expiry_no_increment: false}")

    assert message.startswith("leases.requeue_on_expiry_no_increment: must be true")
    assert "PH.4" in message


SPELLINGS = {      # what the spec calls each setting of the ledger, and what it is called here
    "memorygate.url": ("ledger.url", "http://m:1"),
    "memorygate.auth_token": ("ledger.auth_token", "k"),
    "memorygate.worker_tokens": ("ledger.worker_tokens", False),
    "memorygate.tenant_id": ("ledger.tenant_id", "t"),
    "memorygate.timeout_ms": ("ledger.timeout_ms", 750),
    "memorygate.emission_timeout_ms": ("ledger.timeout_ms", 750),
    "memorygate.emission_retry.max_retries": ("ledger.emission_retry.max_retries", 3),
    "memorygate.circuit_breaker.enabled": ("ledger.circuit_breaker.enabled", False),
    "memorygate.failure_mode": ("receipt_consistency_mode", "strict")}


def variable(name: str) -> str:
    return "ASYNCGATE_" + name.upper().replace(".", "_")


def written(name: str, given: Any) -> str:
    """A YAML file with one setting."""
    *groups, last = name.split(".")
    return json.dumps(reduce(lambda inner, group: {group: inner}, reversed(groups), {last: given}))


@pytest.mark.parametrize("old", SPELLINGS)
def test_a_setting_of_the_ledger_has_two_spellings_in_every_layer(load: Load, old: str) -> None:
    name, given = SPELLINGS[old]
    text = given if isinstance(given, str) else json.dumps(given)

    for spelling in (old, name):
        layers = [load(written(spelling, given)), load(environ={variable(spelling): text}),
                  load(**{spelling.replace(".", "__"): text})]
        assert [value(configured, name) for configured in layers] == [given] * 3
        assert [configured.origins[name].split()[0] for configured in layers] == ["file", "environment", "flag"]
        assert [row for row, _, origin in list_values(layers[0]) if origin != "default"] == [name]


@pytest.mark.parametrize("setting",
                         [setting for setting in list_settings(Settings) if setting.name.startswith("ledger.")],
                         ids=lambda setting: setting.name)
def test_every_setting_that_was_below_memorygate_is_still_read_there(load: Load, setting: Setting) -> None:
    new = {f"ledger.{name}" for name in ("profile", "dialect", "source_system", "contents", "adopt_seconds",
                                       "compare_interval_seconds")}
    old, given = f"memorygate.{setting.name.removeprefix('ledger.')}", json.loads(json.dumps(setting.default))

    if setting.name in new:
        assert "is not a setting" in refusal(load, written(old, given))
    else:
        assert load(written(old, given)).origins[setting.name].startswith("file ")


@pytest.mark.parametrize("old", SPELLINGS)
def test_two_spellings_of_one_setting_must_agree_within_a_layer(load: Load, old: str) -> None:
    name, given = SPELLINGS[old]
    text, other = (str(given).lower(),
                   {False: "true", 750: "751", 3: "4", "strict": "eventual"}.get(given, "http://o:1"))

    message = refusal(load, f"{old}: {text}\n{name}: {other}")
    assert message.startswith(f"{name}: given twice, and differently: {old} (file ")
    assert f"and {name} (file " in message
    message = refusal(load, environ={variable(old): text, variable(name): other})
    assert variable(old) in message
    assert variable(name) in message
    both: Any = {old.replace(".", "__"): text, name.replace(".", "__"): other}
    assert f"(flag --{old})" in refusal(load, **both)


def test_two_spellings_may_say_the_same(load: Load) -> None:
    assert load("ledger: {url: 'http://m:1'}\nmemorygate: {url: 'http://m:1'}").settings.ledger.url == "http://m:1"


def test_either_spelling_overrides_a_lower_layer(load: Load) -> None:
    strict = load("memorygate: {failure_mode: strict}", {}, receipt_consistency_mode="eventual")
    moved = load("ledger: {url: 'http://m:1'}", {"ASYNCGATE_MEMORYGATE_URL": "http://m:2"})

    assert strict.settings.receipt_consistency_mode == "eventual"
    assert moved.settings.ledger.url == "http://m:2"


def test_a_wrong_value_is_told_under_the_spelling_that_was_used(load: Load) -> None:
    assert refusal(load, "memorygate: {timeout_ms: soon}").startswith("memorygate.timeout_ms: 'soon' is not")
    assert "did you mean memorygate.url?" in refusal(load, "memorygate: {urll: 'http://m:1'}")
    assert "did you mean ASYNCGATE_MEMORYGATE_URL?" in refusal(load, environ={"ASYNCGATE_MEMORYGATE_URLL": "x"})


def test_a_token_is_given_once_by_itself_or_in_a_file_whatever_the_spelling(load: Load, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hunter2")
    environ = {"ASYNCGATE_MEMORYGATE_AUTH_TOKEN_FILE": str(tmp_path / "token")}

    assert load(environ=environ).settings.ledger.auth_token == "hunter2"
    for spelling in ("ASYNCGATE_MEMORYGATE_AUTH_TOKEN", "ASYNCGATE_LEDGER_AUTH_TOKEN"):
        message = refusal(load, environ={**environ, spelling: "hunter3"})
        assert message.startswith("ledger.auth_token: given twice, by itself and in a file")
        assert spelling in message
        assert "hunter" not in message


# Secrets


def test_the_api_key_may_come_from_a_file(tmp_path: Path, load: Load) -> None:
    path = tmp_path / "key"
    path.write_text("open-sesame\n")

    configured = load(environ={"ASYNCGATE_API_KEY_FILE": str(path)})

    assert configured.settings.api_key == "open-sesame"
    assert configured.origins["api_key"] == "environment ASYNCGATE_API_KEY_FILE"


def test_two_different_api_keys_in_the_environment_are_refused(tmp_path: Path, load: Load) -> None:
    path = tmp_path / "key"
    path.write_text("open-sesame")

    message = refusal(load, environ={"ASYNCGATE_API_KEY_FILE": str(path), "ASYNCGATE_API_KEY": "another"})

    assert message.startswith("api_key: given twice")
    assert "sesame" not in message
    assert "another" not in message


def test_an_api_key_file_that_is_missing_stops_the_start(tmp_path: Path, load: Load) -> None:
    message = refusal(load, environ={"ASYNCGATE_API_KEY_FILE": str(tmp_path / "absent")})

    assert "cannot be read" in message
    assert "environment ASYNCGATE_API_KEY_FILE" in message


COMMAND = f"{shlex.quote(sys.executable)} -c 'print(\"open-\" + \"sesame\")'"


def test_a_command_may_print_a_secret(load: Load) -> None:
    configured = load(environ={"ASYNCGATE_API_KEY_COMMAND": COMMAND})

    assert configured.settings.api_key == "open-sesame"
    assert configured.origins["api_key"] == "environment ASYNCGATE_API_KEY_COMMAND"
    assert "sesame" not in str(list_values(configured))


@pytest.mark.parametrize(("command", "why"), [
    ("/no/such/program --token hunter2", "No such file"), ("'hunter2", "quotes"), ("", "empty"), ("true", "is empty"),
    (f"{shlex.quote(sys.executable)} -c 'print(\"hunter2\"); raise SystemExit(3)'", "exit status 3")])
def test_a_command_that_prints_no_secret_stops_the_start(load: Load, command: str, why: str) -> None:
    message = refusal(load, environ={"ASYNCGATE_API_KEY_COMMAND": command})

    assert message.startswith("api_key: ")
    assert why in message
    assert "hunter2" not in message


def test_no_shell_reads_a_command(load: Load, tmp_path: Path) -> None:
    load(environ={"ASYNCGATE_API_KEY_COMMAND": f"echo a; touch {tmp_path}/made $HOME"})

    assert list(tmp_path.glob("made*")) == []


@pytest.mark.parametrize("other", ["ASYNCGATE_API_KEY", "ASYNCGATE_API_KEY_FILE"])
def test_a_secret_from_a_command_and_from_elsewhere_is_refused(load: Load, other: str) -> None:
    message = refusal(load, environ={"ASYNCGATE_API_KEY_COMMAND": COMMAND, other: "/dev/null"})

    assert message.startswith("api_key: given twice")


def test_only_a_secret_comes_from_a_command(load: Load) -> None:
    assert "is not a setting" in refusal(load, environ={"ASYNCGATE_PORT_COMMAND": "echo 1"})


@pytest.mark.parametrize(("variable", "end"), [("", ""), ("file", "_FILE"), ("command", "_COMMAND")])
def test_a_variable_of_the_file_has_the_same_three_places(
        load: Load, tmp_path: Path, variable: str, end: str) -> None:
    (tmp_path / "secret").write_text("open-sesame\n")
    (tmp_path / "gate.yaml").write_text("security:\n  oauth:\n    providers:\n      - name: google\n        client_id: "
                                        "a\n        client_secret: ${GOOGLE}\n")
    value = {"": "open-sesame", "file": str(tmp_path / "secret"), "command": COMMAND}[variable]

    configured = load_settings(str(tmp_path / "gate.yaml"), {f"GOOGLE{end}": value})
    assert configured.settings.security.oauth.providers[0].client_secret == "open-sesame"
    with pytest.raises(SettingsError, match="given twice"):
        load_settings(str(tmp_path / "gate.yaml"), {f"GOOGLE{end}": value, "GOOGLE" + ("" if end else "_FILE"): "x"})


CONFIDENTIAL = {
    "api_key": "hunter2",
    "security.oauth.providers": '[{"name": "google", "client_id": "gate", "client_secret": "hunter2"}]',
    "security.rate_limiting.redis_url": "redis://:hunter2@localhost:6379/0",
    "security.jwt.private_key_path": "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----",
    "database.url": "postgresql://asyncgate:hunter2@localhost/asyncgate",
    "ledger.url": "https://hunter2@memorygate.local",
}


@pytest.mark.parametrize("name", CONFIDENTIAL)
def test_a_secret_is_never_shown(load: Load, name: str) -> None:
    configured = load(**{name.replace(".", "__"): CONFIDENTIAL[name]})

    rows = {row: text for row, text, _ in list_values(configured)}

    assert "***" in rows[name]
    assert "hunter2" not in str(list_values(configured))
    assert "hunter2" not in repr(configured)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("postgresql://ann:hunter2@db:5432/gate", "postgresql://ann:***@db:5432/gate"),
        ("postgresql://ann:hun@ter2@db/gate", "postgresql://ann:***@db/gate"),
        ("postgresql://ann@db/gate", "postgresql://ann@db/gate"),
        ("postgresql://db/gate?user=ann&password=hunter2&sslmode=require", None),
        ("sqlite:///a directory/gate.db", "sqlite:///a directory/gate.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
    ],
)
def test_a_url_is_shown_without_its_password(load: Load, url: str, masked: str | None) -> None:
    rows = {name: text for name, text, _ in list_values(load(database__url=url))}

    expected = masked or "postgresql://db/gate?user=ann&password=***&sslmode=require"
    assert rows["database.url"] == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("api_key: 55555555", "api_key"),
        ("api_key: [hunter2]", "api_key"),
        ("database: {url: 'ann:hunter2@db/gate'}", "database.url"),
        ("security: {oauth: {providers: [{name: a, client_secret: hunter2}]}}", "security.oauth.providers"),
        ("security: {rate_limiting: {redis_url: 'localhost?password=hunter2'}}", "security.rate_limiting.redis_url"),
    ],
)
def test_a_refusal_does_not_repeat_a_secret(load: Load, text: str, name: str) -> None:
    message = refusal(load, text)

    assert message.startswith(f"{name}: ")
    assert "hunter2" not in message
    assert "55555555" not in message


def test_effective_lists_every_setting_with_its_origin(load: Load) -> None:
    rows = list_values(load("port: 9000", {"ASYNCGATE_LOG_LEVEL": "debug"}))

    assert [name for name, _, _ in rows] == [setting.name for setting in list_settings(Settings)]
    assert ("log_level", "debug", "environment ASYNCGATE_LOG_LEVEL") in rows
    assert ("host", "127.0.0.1", "default") in rows
    assert [text for name, text, _ in rows if name == "port"] == ["9000"]


# Settings that decide nothing


IDLE = {
    "database.tasks": "a.db", "database.leases": "a.db", "database.receipts": "memorygate",
    "bootstrap.use_obligations_endpoint": "true"}
ONE_VALUE = {"security.jwt.algorithm", "security.api_keys.hash_algorithm", "leases.requeue_on_expiry_no_increment"}


def test_each_setting_that_decides_nothing_says_so_when_somebody_sets_it(load: Load) -> None:
    assert {setting.name for setting in list_settings(Settings) if setting.idle} == set(IDLE)
    assert list_idle(load()) == []

    told = list_idle(load_settings(environ={}, flags=IDLE))

    assert {line.partition(" decides nothing: ")[0] for line in told} == set(IDLE)
    assert [line for line in told if not re.search(r": .+; remove it \(flag --\S+\)$", line)] == []


@pytest.mark.skipif(not find_extras(), reason="some settings are read by extras")
def test_every_other_setting_is_read_by_some_code_or_takes_one_value_only() -> None:
    """A setting is read as an attribute of its group; the name of an attribute is all that can be seen here."""
    root = Path(__file__).parents[2]
    rooms = ("parts", "extras", "backends")
    paths = [root / "asyncgate.py", *(path for room in rooms for path in (root / room).rglob("*.py"))]
    read = {node.attr for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Attribute)}
    read |= {days for kind in KEPT for days in CARDS[kind].lifetime.list_settings()}      # by the pruner of rows

    unread = {setting.name for setting in list_settings(Settings)
              if not setting.idle and setting.name.rpartition(".")[2] not in read}

    assert unread == ONE_VALUE


# Peers' names


RECEIPTGATE = {
    "RECEIPTGATE_ENDPOINT": ("http://r:1", "ledger.url", "http://r:1"),
    "ASYNCGATE_RECEIPTGATE_URL": ("http://r:1", "ledger.url", "http://r:1"),
    "ASYNCGATE_RECEIPTGATE_API_KEY": ("k", "ledger.auth_token", "k"),
    "ASYNCGATE_RECEIPTGATE_EMISSION_TIMEOUT_MS": ("700", "ledger.timeout_ms", 700),
    "ASYNCGATE_RECEIPTGATE_EMISSION_MAX_RETRIES": ("3", "ledger.emission_retry.max_retries", 3),
    "ASYNCGATE_RECEIPTGATE_CIRCUIT_BREAKER_ENABLED": ("false", "ledger.circuit_breaker.enabled", False)}


@pytest.mark.parametrize("variable", RECEIPTGATE)
def test_the_names_that_peers_give_to_the_ledger_s_settings_are_understood(variable: str) -> None:
    text, name, value = RECEIPTGATE[variable]

    configured = load_settings(environ={variable: text})

    assert attrgetter(name)(configured.settings) == value
    assert variable in configured.origins[name]


def test_a_token_under_the_name_of_a_peer_may_lie_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("k\n")

    configured = load_settings(environ={"ASYNCGATE_RECEIPTGATE_AUTH_TOKEN_FILE": str(tmp_path / "token")})

    assert configured.settings.ledger.auth_token == "k"


def test_two_names_of_one_setting_may_not_disagree() -> None:
    environ = {"ASYNCGATE_RECEIPTGATE_URL": "http://r:1", "ASYNCGATE_MEMORYGATE_URL": "http://m:1"}

    with pytest.raises(SettingsError, match="given twice, and differently"):
        load_settings(environ=environ)


def test_a_dialect_is_read_from_yaml_as_it_is_written(tmp_path: Path) -> None:
    for dialect in ("1.0", "1.1", "auto"):
        (tmp_path / "gate.yml").write_text(f"ledger:\n  dialect: {dialect}\n")
        assert load_settings(str(tmp_path / "gate.yml"), environ={}).settings.ledger.dialect == dialect


def test_the_targets_of_escalations_are_read_and_shown_as_peers_write_them() -> None:
    text = '[{"class":1,"to_kind":"worker","to_id":"fallback","tenant_id":""}]'

    configured = load_settings(environ={"ASYNCGATE_ESCALATION_TARGETS": text, "ASYNCGATE_ESCALATION_ENABLED": "true",
                                        "ASYNCGATE_ESCALATION_LEASE_EXPIRY_CLASS": "4"})

    (target,) = configured.settings.escalation.targets
    assert (target.escalation_class, target.to_kind, target.to_id) == (1, "worker", "fallback")
    assert configured.settings.escalation.lease_expiry_class == 4
    assert {name: value for name, value, _ in list_values(configured)}["escalation.targets"] == text
