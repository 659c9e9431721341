"""Limits of waiting calls: one tenant or principal must not use all places (threat F3)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

from asyncgate.parts.model import errors, wire
from asyncgate.parts.model.settings import Settings


class Polls:
    """Counts waiting calls: claims, reads of running tasks, subscriptions."""

    def __init__(self, settings: Settings) -> None:
        self.per_tenant, self.per_principal = settings.max_waiting_per_tenant, settings.max_waiting_per_principal
        self.tenants: Counter[str] = Counter()
        self.principals: Counter[tuple[str, str, str]] = Counter()

    @contextlib.contextmanager
    def place(self, tenant_id: str, who: wire.Principal) -> Iterator[None]:
        """Hold a place for a waiting call; raises TooManyWaiting if the tenant or the principal is at its limit.

        Callers with the shared token choose their names, so only the tenant's limit can stop them.
        """
        key = (tenant_id, who.kind, who.id)
        if self.principals[key] >= self.per_principal:
            raise make_full_error("principal", self.per_principal)
        if self.tenants[tenant_id] >= self.per_tenant:
            raise make_full_error("tenant", self.per_tenant)
        self.principals[key] += 1
        self.tenants[tenant_id] += 1
        try:
            yield
        finally:
            release_place(self.principals, key)
            release_place(self.tenants, tenant_id)


def make_full_error(whose: str, limit: int) -> errors.TooManyWaiting:
    """Return the refusal of a call above the limit."""
    return errors.TooManyWaiting(
        f"{limit} calls of this {whose} are waiting already; call without wait_seconds, or retry "
        "when one of them has ended", retry_after=1, limit=limit)


def release_place(count: Counter[Any], key: Hashable) -> None:
    """Release a place, and forget a caller without places."""
    count[key] -= 1
    if not count[key]:
        del count[key]
