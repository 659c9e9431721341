"""The certificates: the gate's own, and the one that others are shown at its public address."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from urllib.parse import urlsplit

from asyncgate.extras.doctor.installation import Installation
from asyncgate.parts.model import findings
from asyncgate.parts.model.words import say_length

DAY = 86_400.0
SOON_SECONDS, NEAR_SECONDS = 14 * DAY, 30 * DAY
ANSWER_SECONDS = 5.0
RENEW = "renew the certificate, then restart the gate: it reads its certificate at the start"


def check_certificates(at: Installation) -> Iterator[findings.Finding]:
    """Look at the dates of the certificates, and whether certificate and key belong together."""
    from asyncgate.parts.faces.server import make_tls_context  # with the HTTP server, which is large
    tls = at.settings.security.tls
    if tls.certificate_path:
        try:
            make_tls_context(tls)
            from cryptography import x509
            with open(tls.certificate_path, "rb") as file:
                certificate = x509.load_pem_x509_certificates(file.read())[0]
            first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        except (OSError, ValueError) as error:      # ssl.SSLError is an OSError
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            yield findings.alarm(f"{tls.certificate_path}, or its private key, cannot be used: {why}",
                                 "set security.tls.certificate_path and private_key_path to a certificate and its own "
                                 "key")
        else:
            yield from judge_dates(f"the certificate {tls.certificate_path}", first, last, at.clock())
            if at.running is not None and (
                    os.stat(tls.certificate_path).st_mtime > at.clock() - (time.monotonic() - at.running.born)):
                yield findings.warn(f"{tls.certificate_path} was changed after this gate had read it",
                                    "restart the gate")
    if (parts := urlsplit(at.public_url)).scheme == "https" and parts.hostname:
        yield from check_public(parts.hostname, parts.port or 443, at.clock())


def judge_dates(what: str, first: datetime, last: datetime, now: float) -> Iterator[findings.Finding]:
    """Yield what the dates of a certificate mean."""
    left = last.timestamp() - now
    if first.timestamp() > now:
        yield findings.alarm(f"{what} is not valid before {first:%Y-%m-%d %H:%M} UTC",
                             "set the clock, or wait until then")
    elif left <= 0:
        yield findings.alarm(f"{what} expired on {last:%Y-%m-%d}: callers refuse the gate", RENEW)
    elif left < SOON_SECONDS:
        yield findings.warn(f"{what} expires on {last:%Y-%m-%d}, in {say_length(left)}", RENEW)
    elif left < NEAR_SECONDS:
        yield findings.note(f"{what} expires on {last:%Y-%m-%d}, in {say_length(left)}", RENEW)
    else:
        yield findings.all_well(f"{what} is valid until {last:%Y-%m-%d}")


def check_public(host: str, port: int, now: float) -> Iterator[findings.Finding]:
    """Yield what a caller thinks of the certificate that it is shown at the public address."""
    where = f"the certificate at {host}:{port}"
    try:
        with (socket.create_connection((host, port), timeout=ANSWER_SECONDS) as plain,
              ssl.create_default_context().wrap_socket(plain, server_hostname=host) as secure):
            shown = secure.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        yield findings.alarm(f"{where} is refused by callers: {error.verify_message}", RENEW)
    except (OSError, ValueError) as error:
        yield findings.alarm(f"{host}:{port} cannot be reached: {error}",
                             "start the gate or its proxy there, or correct --url")
    else:
        dates = [datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown[name])), UTC)
                 for name in ("notBefore", "notAfter")]
        yield from judge_dates(where, dates[0], dates[1], now)

