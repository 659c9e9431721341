"""What the conformance plugin itself promises."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from asyncgate.conformance.plugin import UNCLOSED, make_loop


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop does not run there")
def test_a_loop_that_is_closed_names_what_nobody_closed_and_does_not_wait_for_it() -> None:
    ours, theirs = socket.socketpair()
    loop = make_loop()
    with theirs:
        kept = loop.run_until_complete(loop.create_connection(asyncio.Protocol, sock=ours))
        loop.close()
    left, UNCLOSED[:] = [*UNCLOSED], []
    assert kept     # until here: whoever forgets a transport closes it
    assert [text.split()[2] for text in left] == ["<UnixTransport"]
