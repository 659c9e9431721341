"""A server that speaks S3."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

SURROUNDINGS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Return the address of the server."""
    pytest.importorskip("boto3", reason="boto3 is not installed")
    server = pytest.importorskip("moto.server", reason="moto is not installed").ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def connect(url: str) -> Any:
    """Return a client of the server."""
    boto3 = import_module("boto3")      # which says nothing of its types
    return boto3.client("s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret",
                        region_name="us-east-1")
