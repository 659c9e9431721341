"""Calls of a ledger: in time, without redirects or proxies, and with answers that are bounded before they are read.

A ledger is somebody else's program, and agents may have written the contents of its answers.  So an answer is read as
it arrives, never decompressed, up to a limit of bytes for its call, and its nesting is checked on its bytes.
An invalid answer is not an outage: otherwise anybody who can make a ledger give one could stop all receipts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from asyncgate.extras.ledger import sinks
from asyncgate.parts.model import errors
from asyncgate.parts.model.screening import MAX_DEPTH, screen_body
from asyncgate.parts.process.authorities import load_authorities

if TYPE_CHECKING:
    import httpx2

MOST_TOLD = 300             # characters of a ledger's answer that messages quote
SMALL = 2**20               # bytes of an answer that holds no receipts
BESIDE_BODY = 2**16         # bytes that a receipt may have besides its body
MOST_ANSWER_DEPTH = MAX_DEPTH + 16     # the deepest body that a gate accepts, in a receipt, in a list, in an answer
ANY_NUMBER = 2**62          # no limit on the number of values
# No receipt causes these: the ledger, or the way to it, is out of order.
AWAY_STATUSES = {401, 407, 421, 425, 429, 502, 503, 504}
ON_THE_WAY = {502, 504}     # from a proxy: the ledger itself may have stored the receipt
# These are about the ledger or the gate's credential, not about the receipt.
NOT_ABOUT_THE_RECEIPT = {403, 404, 405, 408}


class LedgerAnswer(Struct):
    """An answer of a ledger."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """Return the beginning of the content as text."""
        return self.content[:MOST_TOLD].decode("utf-8", "replace")


class Calls:
    """Makes calls to one ledger; raises Outage, Unanswered or Garbled without a valid answer."""

    def __init__(self, token: str, connections: int) -> None:
        self.headers = {"content-type": "application/json", "accept-encoding": "identity",
                        **({"authorization": f"Bearer {token}"} if token else {})}
        self.connections = connections
        self.http: httpx2.AsyncClient | None = None

    async def ask(self, verb: str, url: str, *, seconds: float, most_bytes: int = SMALL, **more: Any) -> LedgerAnswer:
        """Make one call and read its whole answer."""
        import httpx2
        if self.http is None:
            from asyncgate.parts.process.outgoing import NamedTransport
            transport = NamedTransport(load_authorities(), httpx2.Limits(max_connections=self.connections))
            self.http = httpx2.AsyncClient(transport=transport, trust_env=False, headers=self.headers)
        try:
            async with asyncio.timeout(seconds), self.http.stream(verb, url, timeout=seconds, **more) as answer:
                content = await read_content(answer, most_bytes)
        except (httpx2.TransportError, TimeoutError) as error:
            late = isinstance(error, TimeoutError | httpx2.ReadTimeout | httpx2.WriteTimeout)
            untaken = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
            why = f"{type(error).__name__}: {error}"[:MOST_TOLD]
            raise (sinks.Unanswered if late else sinks.Outage)(why, untaken=untaken) from None
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise sinks.Garbled(f"{type(error).__name__}: {error}"[:MOST_TOLD]) from None
        return LedgerAnswer(answer.status_code, answer.headers, content)

    async def close(self) -> None:
        """Close the connections."""
        if self.http is not None:
            await self.http.aclose()


async def read_content(answer: httpx2.Response, most_bytes: int) -> bytes:
    """Read an answer; raises Garbled if it is compressed, too large, or nested too deep."""
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise sinks.Garbled("the ledger compressed its answer, which was not requested")
    pieces, size = list[bytes](), 0
    async for piece in answer.aiter_raw():
        pieces.append(piece)
        size += len(piece)
        if size > most_bytes:
            raise sinks.Garbled(f"the ledger's answer is larger than {most_bytes} bytes")
    content = b"".join(pieces)
    try:
        await screen_body(content, ANY_NUMBER, MOST_ANSWER_DEPTH)
    except (errors.GateError, UnicodeDecodeError) as wrong:
        if answer.status_code == 200:
            raise sinks.Garbled(f"the ledger's answer cannot be read: {wrong}") from None
    return content


def answer_error(verb: str, answer: LedgerAnswer) -> Exception:
    """Turn a failed answer into an error: a refusal of the receipt, an outage, or an invalid answer."""
    message = f"{answer.status_code} {answer.text}"[:MOST_TOLD]
    if answer.status_code == 404 and verb == "GET":
        return sinks.Missing(message)
    if answer.status_code in AWAY_STATUSES:
        after = answer.headers.get("retry-after", "")
        return sinks.Outage(message, float(after) if after.isascii() and after.isdigit() else 0.0,
                            untaken=answer.status_code not in ON_THE_WAY)
    if 400 <= answer.status_code < 500 and answer.status_code not in NOT_ABOUT_THE_RECEIPT:
        return sinks.Refusal(message)
    return sinks.Garbled(message, untaken=answer.status_code in NOT_ABOUT_THE_RECEIPT)
