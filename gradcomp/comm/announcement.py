"""Lines that gradcomp announces, such as that compression has begun, and how many bytes it saves."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

LOGGER = "gradcomp"
QUIET = "GRADCOMP_QUIET"
_num_silencers, _level = 0, logging.NOTSET


@contextmanager
def silenced() -> Iterator[None]:
    """Announce and log nothing in this process, for programs that run hundreds of states."""
    global _num_silencers, _level
    logger = logging.getLogger(LOGGER)
    if not _num_silencers:
        _level = logger.level
        logger.setLevel(logging.CRITICAL)
    _num_silencers += 1
    try:
        yield
    finally:
        _num_silencers -= 1
        if not _num_silencers:
            logger.setLevel(_level)


def shown_bytes(num_bytes: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def say(text: str, group: dist.ProcessGroup | None) -> None:
    """Log the text on the group's rank 0, at level INFO.

    Without a configuration of logging, the text goes to standard error.
    """
    if group is not None and group.rank() != 0:
        return
    if _num_silencers or os.environ.get(QUIET, "0") not in ("", "0"):
        return
    logger = logging.getLogger(LOGGER)
    is_configured = logger.hasHandlers() or logger.level != logging.NOTSET
    if is_configured or logging.root.level != logging.WARNING or logging.root.manager.disable:
        logger.info("%s", text)
    elif not dist.is_initialized() or dist.get_rank() == 0:
        # Each group of some of the ranks, such as FSDP2's replicas, has its own rank 0: only one may print.
        print(f"{LOGGER}: {text}", file=sys.stderr, flush=True)
