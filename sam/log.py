"""Warnings of this project on standard error, whatever other packages have done to Python's root logger.

Root cause: vLLM's API server imports model-hosting-container-standards, which sets the root logger and its handlers to
ERROR. Symptom: a process that has imported that server, as every process of a verl run does, drops all warnings of
loggers without a level of their own. Can go when the package leaves the root logger alone.
"""

import logging
import re
import sys

FORMAT, TIME = "%(levelname)s %(asctime)s [%(name)s] %(message)s", "%m-%d %H:%M:%S"
LINE = re.compile(r"(?:WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[([\w.]+)\] (.*)")  # of that format: logger, message


class WarningsOnStderr(logging.Handler):
    """Writes a record in a line, unless a handler of the root logger shows it: each is written once."""

    def emit(self, record: logging.LogRecord) -> None:
        shown = [one for one in logging.root.handlers if not isinstance(one, logging.NullHandler)]
        if any(record.levelno >= one.level for one in shown):
            return
        try:
            # Looked up each time: Ray and vLLM replace it in their processes.
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


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
