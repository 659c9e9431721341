"""What the tests of identity ask of."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.identity_tools import House, security


@pytest.fixture
async def house(serve: Any) -> House:
    """A gate that issues keys."""
    return House(await serve(security=security()))
