"""Exchanges on gloo: received rows, sums, the order of posts, errors."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from gradcomp.comm import exchange
from gradcomp.comm.exchange import all_gather, all_reduce, all_to_all, reduce_scatter, takes_one_exchange
from gradcomp.comm.pipeline import run_through
from tests.comm.exchanges import check
from tests.ranks import of_all_ranks
from tests.reducer.models import run_cases


def on_every_rank(rank):
    for length in (1, 5, 1000):
        check(dist.group.WORLD, length)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_row_arrives(run_ranks, world_size):
    run_ranks(on_every_rank, world_size)


def summed(rank, dtype):
    sent = torch.full((3, 5), 256.0 if rank == 0 else 1.0, dtype=dtype)
    own = torch.empty(5, dtype=dtype)
    run_through(reduce_scatter(own, sent, dist.group.WORLD))
    return own


def test_sums_in_16_bits_are_rounded_once(run_ranks):
    """In bf16, 256 + 1 is 256 again, so partial sums in bf16 would give 256."""
    for own in run_ranks(summed, 3, torch.bfloat16):
        assert torch.equal(own, torch.full((5,), 258.0, dtype=torch.bfloat16))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("config", ["cpu:nccl", "cuda:gloo,cpu:nccl"])
def test_nccl_sums_whichever_backends_a_group_has(rank, config):
    with (
        mock.patch.object(dist, "get_backend_config", return_value=config),
        mock.patch.object(dist, "reduce_scatter_tensor") as reduce_scatter_tensor,
    ):
        run_through(reduce_scatter(torch.zeros(4), torch.zeros(1, 4), dist.group.WORLD))
    assert reduce_scatter_tensor.call_count == 1


@pytest.mark.ranks(4)
def test_ranks_are_the_groups_own(rank):
    group = dist.new_group([1, 3], timeout=timedelta(seconds=10))
    if rank in (1, 3):
        check(group, 7)


@pytest.mark.ranks(3)
def test_receives_are_posted_first_and_ranks_begin_with_different_ones(rank):
    """No direction of a link waits if every receive is posted first."""
    order = []

    def note(name):
        function = getattr(dist, name)

        def noted(tensor, **arguments):
            order.append((name, arguments["group_dst" if name == "isend" else "group_src"]))
            return function(tensor, **arguments)

        return mock.patch.object(dist, name, noted)

    with note("isend"), note("irecv"):
        check(dist.group.WORLD, 3)
    for rank, calls in enumerate(of_all_ranks(order)):
        others = [(rank + 1) % 3, (rank + 2) % 3]
        one = [(name, other) for name in ("irecv", "isend") for other in others]
        assert calls == one + one


@pytest.mark.ranks(2)
@pytest.mark.parametrize("length", [3, 3_000_000])
def test_an_exchange_that_nobody_waits_for_leaves_the_group_usable(rank, length):
    both_ranks = torch.zeros(2, length, dtype=torch.uint8)
    # Nobody waits for this exchange, as when another bucket's error ends the step.
    all_to_all(both_ranks.clone(), both_ranks, dist.group.WORLD)
    check(dist.group.WORLD, length)
    dist.all_reduce(torch.ones(1))


@pytest.mark.ranks(2)
def test_receives_of_exchanges_that_are_given_up_are_kept_until_another_one_is_complete(rank):
    """Begin all-gathers that nobody waits for."""
    left = []
    for _ in range(3):
        received = torch.zeros(2, 1_000_000)
        memory = StorageWeakRef(received.untyped_storage())
        all_gather(received, torch.ones(1_000_000), dist.group.WORLD)
        del received
        before = not memory.expired()  # gloo may still write there
        check(dist.group.WORLD, 7)
        left.append((before, not memory.expired()))
    assert of_all_ranks(left) == [[(True, False)] * 3] * 2


@pytest.mark.ranks(2)
def test_ranks_that_are_out_of_step_get_an_error_and_no_other_exchanges_bytes(rank):
    """Leave out the all_gather on rank 0, as an error there would; the ranks' next exchanges differ."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    rows = torch.zeros(2, 5, dtype=torch.uint8)
    all_to_all(torch.empty_like(rows), rows, group).wait()
    if rank == 0:
        pending = all_to_all(torch.empty_like(rows), rows, group)
    else:
        pending = all_gather(torch.empty_like(rows), rows[0], group)
    with pytest.raises(RuntimeError, match=r"Timed out|Connection (reset|closed) by peer"):
        pending.wait()


@pytest.mark.ranks(2)
def test_a_second_wait_returns_at_once(rank):
    rows = torch.full((2, 5), rank, dtype=torch.uint8)
    received = torch.empty_like(rows)
    work = all_to_all(received, rows, dist.group.WORLD)
    assert work.wait()
    assert work.wait()
    assert received[:, 0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("num_bytes", "world_size", "has_delay", "expected"),
    [
        (10**9, 2, False, True),
        (10**9, 2, True, True),
        (1, 3, False, False),
        (2**18, 3, True, True),
        (2**18 + 1, 3, True, False),
        (2**17, 4, True, True),
        (2**17 + 1, 4, True, False),
    ],
)
def test_the_number_of_exchanges(num_bytes, world_size, has_delay, expected):
    assert takes_one_exchange(num_bytes, world_size, has_delay=has_delay) == expected


def sum_of(rank, dtype, numel, limit, out_dtype):
    wire = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
    before, out = wire.clone(), None if out_dtype is None else torch.empty(numel, dtype=out_dtype)
    with mock.patch.object(exchange, "ONE_EXCHANGE_BYTES", limit):
        run_through(all_reduce(wire, dist.group.WORLD, has_delay=True, out=out))
    return before, wire if out is None else out


SUMMED = [(dtype, None) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
SUMMED += [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_are_in_the_order_of_the_ranks(run_ranks, world_size):
    """In fp32 (fp64), and rounded once to the wire's dtype if there are two exchanges."""
    cases = [(dtype, 11, limit, out_dtype) for dtype, out_dtype in SUMMED for limit in (0, 2**18)]
    ranks = run_ranks(run_cases, world_size, sum_of, cases)
    for (dtype, _, limit, out_dtype), results in zip(cases, zip(*ranks, strict=True), strict=True):
        total = torch.zeros(11, dtype=torch.promote_types(dtype, torch.float32))
        for before, _ in results:
            total += before
        if limit == 0 and world_size > 2:
            total = total.to(dtype)
        for _, summed in results:
            assert torch.equal(summed, total.to(out_dtype or dtype)), (dtype, out_dtype, limit)


@pytest.mark.ranks(2)
def test_a_message_of_another_size_is_an_error_on_every_rank(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    with pytest.raises(RuntimeError, match=r"Timed out|Connection (reset|closed) by peer"):
        run_through(all_reduce(torch.ones(5 + rank), group, has_delay=True))
