"""W3C trace context as it comes from outside: checked, bounded, and never a reason to refuse a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgate.parts.model.trace import LONGEST_STATE, Trace, find_trace, read_parent, read_state

IDS = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
GOOD = f"00-{IDS}"
HOSTILE = [
    "", "00", GOOD.upper(), GOOD[:-1], GOOD + "0", f"{GOOD}-more", f"ff-{IDS}", f"0-{IDS}",
    f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01", GOOD.replace("-", "_"), f"{GOOD}\n",
    f"{GOOD}\r\nx-api-key: a", GOOD.replace("0a", "é"), GOOD.replace("0a", "\u0660a"), f"{GOOD}\0",
    f"01-{IDS}-{'x' * 201}", f"01-{IDS}-\n", "00-" + "a" * 100_000, "'; drop table tasks; --"]


def test_a_valid_parent_is_kept_as_it_is() -> None:
    assert read_parent(GOOD) == GOOD
    assert read_parent(f" {GOOD}\t") == GOOD


def test_of_a_later_version_the_known_parts_are_passed_on() -> None:
    assert read_parent(f"01-{IDS}-what-may-come") == read_parent(f"cc-{IDS}") == GOOD


@pytest.mark.parametrize("header", HOSTILE, ids=range(len(HOSTILE)))
def test_an_invalid_parent_counts_as_none(header: str) -> None:
    assert read_parent(header) is None
    assert find_trace([(b"traceparent", header.encode()), (b"tracestate", b"a=1")]) is None


def test_two_parents_count_as_none() -> None:
    assert find_trace([(b"traceparent", GOOD.encode())] * 2) is None


def test_the_states_of_several_headers_are_joined_and_empty_ones_left_out() -> None:
    headers = [(b"tracestate", b"a=1 , ,b@c=2"), (b"traceparent", GOOD.encode()), (b"tracestate", b"d=x:y")]

    assert find_trace(headers) == Trace(GOOD, "a=1,b@c=2,d=x:y")


@pytest.mark.parametrize("header", [
    "", " , ", "a", "a=", "A=1", "a=1,a=2", "a=b=c", "a=é", "a=1\n", ",".join(f"a{n}=1" for n in range(33)),
    "a=" + "x" * LONGEST_STATE, "=1", "a b=1"])
def test_an_invalid_state_is_dropped_and_the_parent_stays(header: str) -> None:
    headers = [(b"traceparent", GOOD.encode()), (b"tracestate", header.encode())]

    assert find_trace(headers) == Trace(GOOD, None)


@given(st.binary(), st.binary())
def test_no_header_makes_it_fail_and_what_it_takes_is_bounded(parent: bytes, state: bytes) -> None:
    trace = find_trace([(b"traceparent", parent), (b"tracestate", state)])

    assert trace is None or (trace.traceparent or "").isascii()


@given(st.text("ab=,@ \t-", max_size=600))
def test_a_state_that_is_taken_is_taken_again(text: str) -> None:
    once = read_state(text)

    assert once is None or (read_state(once) == once and len(once) <= LONGEST_STATE)
