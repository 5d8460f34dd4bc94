"""Logs: one JSON object a line for machines, or plain lines for people. Set up once by `main`."""

import logging
import sys
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

LogFormat = Literal["json", "plain"]


def configure_logs(level: str, log_format: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stdout)
    if log_format == "json":
        fields = "%(asctime)s %(levelname)s %(name)s %(message)s"
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter(fields, rename_fields=names))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf reports every watch event it hands to us.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # The kubelet asks for our health every few seconds.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
