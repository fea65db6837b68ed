"""One line that announces that a state has begun to compress, and how many bytes that saves."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

LOGGER = "gradcomp"
QUIET = "GRADCOMP_QUIET"
_num_silencers = 0


@contextmanager
def silenced() -> Iterator[None]:
    """Announce nothing in this process, for programs that run hundreds of states."""
    global _num_silencers
    _num_silencers += 1
    try:
        yield
    finally:
        _num_silencers -= 1


def announce_start(
    what: str,
    step: int,
    gradient_bytes: int,
    sent_bytes: int,
    group: dist.ProcessGroup | None,
    nodes: str | None,
) -> None:
    """Announce on rank 0 that a state has begun to compress, and how many bytes that saves.

    what: the algorithm's name.
    step: the number of the first compressed step.
    gradient_bytes: the bytes of that step's gradients.
    sent_bytes: the bytes that a rank sends in that step; with nodes, a node.
    nodes: the nodes in words; None if the state averages without nodes.
    """
    if group is None or group.rank() == 0:
        _say(_text(what, step, gradient_bytes, sent_bytes, nodes))


def _text(what: str, step: int, gradient_bytes: int, sent_bytes: int, nodes: str | None) -> str:
    if sent_bytes < gradient_bytes:
        rate = f"{gradient_bytes / sent_bytes:.1f} times fewer bytes" if sent_bytes else "no bytes"
    else:
        rate = f"{sent_bytes / gradient_bytes:.2f} times as many bytes"
    per = "rank" if nodes is None else f"node, between {nodes}"
    sizes = f"{_shown(sent_bytes)} of {_shown(gradient_bytes)} per step and {per}"
    return f"{what} compresses from step {step} on: {rate}, {sizes}"


def _shown(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def _say(text: str) -> None:
    """Log the text at level INFO. If the program has not configured logging, write it to standard error."""
    if _num_silencers or os.environ.get(QUIET, "0") not in ("", "0"):
        return
    logger = logging.getLogger(LOGGER)
    is_configured = logger.hasHandlers() or logger.level != logging.NOTSET
    if is_configured or logging.root.level != logging.WARNING or logging.root.manager.disable:
        logger.info("%s", text)
    elif not dist.is_initialized() or dist.get_rank() == 0:
        # Each group of some of the ranks, such as FSDP2's replicas, has its own rank 0: only one may print.
        print(f"{LOGGER}: {text}", file=sys.stderr, flush=True)
