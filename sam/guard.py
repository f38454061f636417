"""Where drafting may fail: nothing of it ends a rollout, or changes one."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def guard(logger: logging.Logger, counters: dict[str, float], name: str, failure: str) -> Iterator[None]:
    """Count what fails within, of any kind, in `counters[name]`; log the first with `failure`, which says what goes on.

    What stands behind the block runs after a fault alone where the block ends with `return`.
    """
    try:
        yield
    except Exception as error:  # of any kind: a fault in drafting costs drafts and nothing else
        if not counters[name]:
            logger.exception(f"{failure}: {error!r} (logged once, then counted)")
        counters[name] += 1
