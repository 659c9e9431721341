"""Tests of the suite with a ledger: agents and workers must not notice a difference (spec 20.8).

These are a selection, so that the suite stays fast; `--receipts eventual` or `strict` runs the whole suite this way.
"""

from __future__ import annotations

import pytest

from asyncgate.conformance.test_cancel import test_a_task_that_has_ended_stays_as_it_is as test_ended_stays
from asyncgate.conformance.test_complete import (
    test_a_completed_task_has_succeeded_and_shows_its_result as test_result_is_shown,
)
from asyncgate.conformance.test_complete import test_saying_it_twice_writes_nothing as test_twice_writes_nothing
from asyncgate.conformance.test_expiry import test_a_lost_lease_is_told_to_the_owner as test_lost_lease_is_told
from asyncgate.conformance.test_expiry import (
    test_a_passed_deadline_is_an_anomaly_told_once_and_nothing_else as test_deadline_is_told_once,
)
from asyncgate.conformance.test_fail import (
    test_the_same_failure_again_returns_the_same_answer_and_writes_nothing as test_same_failure_again,
)
from asyncgate.conformance.test_leases import (
    test_a_release_may_be_repeated_by_its_worker_only as test_release_is_repeated,
)
from asyncgate.conformance.test_obligations import (
    test_an_obligation_is_listed_as_the_receipt_that_opened_it as test_obligation_is_its_receipt,
)
from asyncgate.conformance.test_obligations import (
    test_obligations_are_followed_page_by_page as test_obligations_by_page,
)
from asyncgate.conformance.test_obligations import (
    test_open_obligations_are_created_minus_discharged as test_open_is_created_minus_discharged,
)
from asyncgate.conformance.test_receipts import test_each_step_writes_exactly_its_receipts as test_each_step
from asyncgate.conformance.test_receipts import (
    test_the_same_ack_again_returns_the_first_and_writes_nothing as test_same_ack_again,
)
from asyncgate.conformance.test_schedules import (
    test_a_schedule_that_is_late_again_is_told_again as test_late_again_is_told_again,
)

__all__ = [
    "test_deadline_is_told_once", "test_each_step", "test_ended_stays", "test_late_again_is_told_again",
    "test_lost_lease_is_told", "test_obligation_is_its_receipt", "test_obligations_by_page",
    "test_open_is_created_minus_discharged", "test_release_is_repeated", "test_result_is_shown",
    "test_same_ack_again", "test_same_failure_again", "test_twice_writes_nothing"]

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("receipts", ["eventual", "strict"], indirect=True)]
