"""Warnings of this project on standard error, whatever other packages have done to Python's root logger.

Root cause: vLLM's API server imports model-hosting-container-standards, which sets the root logger and its handlers to
ERROR. Symptom: a process that has imported that server, as every process of a verl run does, drops all warnings of
loggers without a level of their own. Can go when the package leaves the root logger alone.
"""

import logging
import re

FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
TIME = "%m-%d %H:%M:%S"
LINE = re.compile(r"(?:WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[([\w.]+)\] (.*)")  # of that format: logger, message


# Python's handler of last resort looks sys.stderr up each time: Ray and vLLM replace it in their processes.
class WarningsOnStderr(type(logging.lastResort)):
    """Writes a record in a line, unless a handler of the root logger shows it: each is written once."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether no other handler shows it."""
        others = [handler for handler in logging.root.handlers if not isinstance(handler, logging.NullHandler)]
        return not any(record.levelno >= handler.level for handler in others)


def show_warnings(*packages: str) -> None:
    """Show warnings and errors of the loggers below `packages`. Call it any number of times, in every process.

    A level that the application has given a package's logger stays as it is.
    """
    for package in packages:
        logger = logging.getLogger(package)
        if any(isinstance(handler, WarningsOnStderr) for handler in logger.handlers):
            continue
        handler = WarningsOnStderr(logging.WARNING)
        handler.setFormatter(logging.Formatter(FORMAT, TIME))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
