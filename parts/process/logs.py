"""Logging: one line per record, whatever its values contain, without secrets."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from copy import copy
from typing import Any

import msgspec

from asyncgate.parts.model.settings import Settings, mask_credentials_in_prose
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.model.words import UNSAFE
from asyncgate.parts.process.outages import Sparse

# Issued keys; codes and refresh tokens; access tokens.
SECRETS = re.compile(r"aga_[0-9A-Za-z]{12,}|ag[cr]_[0-9a-f-]{36}\.[0-9A-Za-z_.-]+|eyJ[0-9A-Za-z_-]+\.[0-9A-Za-z_.-]+")
HIDDEN = "***"


class Redaction:
    """Removes credentials and the values of sensitive fields from log records (spec 21.10.1)."""

    def __init__(self, fields: Iterable[str] = ()) -> None:
        self.fields = frozenset(name.lower() for name in fields)
        names = "|".join(map(re.escape, sorted(self.fields))) or r"(?!)"
        # A member in JSON or Python, with its quotes escaped or not, or a parameter of a query.
        self.members = re.compile(
            rf"""((?<!\w)(?:{names})(?:\\*["'])?\s*(?:=|(?<=["']):)\s*)"""
            r"""(?:"(?:[^"\\]|\\.)*"|\\+"[^"]*"|'[^']*'|[^\s"',;&}\])\\]+)""", re.IGNORECASE)

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        return mask_credentials_in_prose(SECRETS.sub(HIDDEN, self.members.sub(rf"\1{HIDDEN}", text)))

    def tree(self, value: Any) -> Any:
        """Return a value for JSON without secrets."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {name: HIDDEN if str(name).lower() in self.fields and inner is not None else self.tree(inner)
                    for name, inner in value.items()}
        return [self.tree(inner) for inner in value] if isinstance(value, list | tuple) else value


class JsonLines(logging.Formatter):
    """One JSON object per line, so that no value can break out of its line."""

    redaction = Redaction()

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        line = {"timestamp": to_utc(record.created), "level": record.levelname.lower(), "logger": record.name,
                **(fields or {"message": record.getMessage()})}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(self.redaction.tree(line)).decode()


class Lines(logging.Formatter):
    """One plain line per record; control characters are escaped."""

    redaction = Redaction()

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; other handlers see it unchanged."""
        own = copy(record)
        own.msg, own.args = UNSAFE.sub(escape_control, record.getMessage()), ()
        return self.redaction.text(super().format(own))


def escape_control(match: re.Match[str]) -> str:
    """Escape a character that controls, hides or reverses text as JSON does, so that JSON within a line stays JSON."""
    code = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(match[0], f"\\u{ord(match[0]):04x}")
    return code if match[0] < "\U00010000" else json.dumps(match[0])[1:-1]      # which has two halves


def start_logging(settings: Settings) -> None:
    """Log to stderr in the format that the settings name."""
    handler = logging.StreamHandler()
    form = JsonLines() if settings.log_format == "json" else Lines("%(asctime)s %(levelname)s %(name)s: %(message)s")
    form.redaction = Redaction(settings.security.audit_logging.sensitive_fields)
    handler.setFormatter(form)
    handler.addFilter(Sparse())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)      # the gate logs its own start
    logging.getLogger("httpx2").setLevel(logging.WARNING)       # at info it logs every request
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
