"""Log lines on stderr, as text or JSON. A request's line holds numbers and ids, never what was said."""

import json
import logging
import time


class TextFormatter(logging.Formatter):
    """`2026-11-29 18:00:00 INFO request request_id=... status=200`."""

    def __init__(self):
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        details = getattr(record, "line", {})
        shown = [f"{name}={_plain(value)}" for name, value in details.items() if value is not None]
        return " ".join([super().format(record), *shown])


class JsonFormatter(logging.Formatter):
    """One object per line."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {"time": f"{stamp}.{record.msecs:03.0f}Z", "level": record.levelname, "logger": record.name}
        entry |= {"message": record.getMessage(), **getattr(record, "line", {})}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure(log_format: str) -> None:
    """Send the server's, the engine's and uvicorn's lines to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name, level in (("jaxserve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def _plain(value: object) -> str:
    """A value without spaces and line breaks, in quotes if it has some."""
    text = str(value)
    return json.dumps(text) if any(character.isspace() for character in text) else text
