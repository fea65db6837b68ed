"""Exchanges of numbers that say which rank sent them, and groups that know a delay."""

import os
from unittest import mock

import torch
import torch.distributed as dist

from gradcomp.comm.exchange import GIVEN, all_gather, all_to_all, has_delay

CPU = torch.zeros(1)


def give_delay(group):
    with mock.patch.dict(os.environ, {GIVEN: "50"}):
        assert has_delay(CPU, group)
    return group


def group_with_delay(**options):
    return give_delay(dist.new_group(**options))


def begin(kind, length, number, group):
    """Begin an exchange. Returns a function that waits for it and checks what has come."""
    rank, size = group.rank(), group.size()
    own = torch.arange(size * length, dtype=torch.float32).view(size, length) + 1000 * number + rank
    received = torch.full((size, length), -1.0)
    work = all_to_all(received, own, group) if kind == "all_to_all" else all_gather(received, own[0], group)

    def finish():
        work.wait()
        for source in range(size):
            row = rank if kind == "all_to_all" else 0
            expected = torch.arange(length) + float(row * length + 1000 * number + source)
            assert torch.equal(received[source], expected), (kind, length, number, source)

    return finish


def take_step(exchanges, group, number=0):
    """Begin exchanges, (kind, length) pairs, and then wait for each."""
    for finish in [begin(kind, length, number, group) for kind, length in exchanges]:
        finish()


def check(group, length):
    """Take a step with an exchange of each kind."""
    take_step([("all_to_all", length), ("all_gather", length)], group)
