"""Log lines: one record, one line, whatever the values contain."""

from __future__ import annotations

import logging
import re

import msgspec

from asyncgate.parts.settings import Settings
from asyncgate.parts.views import outside


class JsonLines(logging.Formatter):
    """One JSON object a line, so that no value can break out of its line."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        line = {"timestamp": outside(record.created), "level": record.levelname.lower(), "logger": record.name,
                "message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class Lines(logging.Formatter):
    """One plain line a record; control characters in what came from outside are spelled out."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        record.msg, record.args = re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda c: repr(c[0])[1:-1], record.getMessage()), ()
        return super().format(record)


def start_logging(settings: Settings) -> None:
    """Log to stderr in the format that the settings ask for."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if settings.log_format == "json" else
                         Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("uvicorn").setLevel(logging.WARNING)      # the gate says itself when it begins to serve
    logging.getLogger("httpx2").setLevel(logging.WARNING)       # at info it tells of every request
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
