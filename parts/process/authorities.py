"""The certificate authorities that this process trusts."""

from __future__ import annotations

import ssl
from functools import cache


@cache
def load_authorities() -> ssl.SSLContext:
    """Return the TLS settings of all outgoing calls.

    They are made once: reading the authorities takes 40 ms of the processor, and of an event loop.
    """
    import httpx2
    return httpx2.create_ssl_context()
