"""Receives that are posted ahead: right rows whatever comes."""

import gc
import os
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gradcomp
from gradcomp.comm import exchange, process_group
from gradcomp.comm.exchange import GIVEN, _exchanges_of, all_gather, all_reduce, all_to_all
from gradcomp.comm.pipeline import run_through
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.comm.exchanges import CPU, begin, give_delay, group_with_delay, take_step
from tests.programs import run_python
from tests.ranks import of_all_ranks

STEP = [("all_to_all", 40), ("all_gather", 8), ("all_gather", 8), ("all_gather", 300), ("all_to_all", 40)]


def posted(group):
    return {exponent: len(each.ahead) for exponent, each in _exchanges_of(CPU, group).channels.items()}


@pytest.mark.ranks(3)
def test_receives_are_posted_ahead_without_growth(rank):
    """Also in inference mode, and with the user's own messages in between."""
    group, kept = group_with_delay(), []
    for number in range(100):
        with torch.inference_mode(number % 7 == 3):
            take_step(STEP, group, number)
        user = torch.tensor([float(rank)])
        sent = dist.isend(user, group=group, group_dst=(rank + 1) % 3)
        dist.recv(user := torch.empty(1), group=group, group_src=(rank - 1) % 3)
        sent.wait()
        assert user.item() == (rank - 1) % 3
        if number in (70, 99):
            gc.collect()
            tensors = sum(type(each) is torch.Tensor for each in gc.get_objects())
            kept.append((tensors, len(_exchanges_of(CPU, group).under_way), posted(group)))
    assert kept[0] == kept[1]
    assert kept[0][2] == {6: 64, 8: 64, 11: 64}  # of 32, 160 and 1,200 bytes, with a heading


@pytest.mark.ranks(3)
def test_what_is_posted_ahead_is_bounded(rank):
    """From two other ranks, in powers of two of bytes."""
    group = group_with_delay()
    for kb in (256, 512, 1024, 2048, 4096):
        for number in range(8):
            take_step([("all_gather", kb * 256 - 8)], group, number)
    assert posted(group) == {18: 16, 19: 8, 20: 4, 21: 2, 22: 1}
    take_step([("all_gather", 4096 * 256 - 2)], group)
    assert 23 not in posted(group)


@pytest.mark.ranks(3)
def test_all_ranks_post_as_many_receives(rank):
    """torch's debug level DETAIL compares them. The ranks' shards are on both sides of a power of two."""
    group, wire = group_with_delay(), torch.ones(4)
    with mock.patch.object(exchange, "ONE_EXCHANGE_BYTES", 0):
        run_through(all_reduce(wire, group, has_delay=True))
    assert torch.equal(wire, torch.full((4,), 3.0))
    assert of_all_ranks(posted(group)) == [{6: 4}] * 3


def play(seed, group):
    """Take steps whose exchanges change now and then, or that end early; another model's come in between."""
    chance, number = random.Random(seed), 0
    kinds = [("all_to_all", 5), ("all_gather", 5), ("all_gather", 0), ("all_gather", 7), ("all_to_all", 64)]
    step, other = chance.choices(kinds, k=chance.randint(1, 9)), chance.choices(kinds, k=3)
    for _ in range(40):
        if chance.random() < 0.1:
            step = chance.choices(kinds, k=chance.randint(1, 9))
        exchanges = step + other * (chance.random() < 0.3) + [chance.choice(kinds)] * (chance.random() < 0.1)
        running = []
        for kind, length in exchanges:
            number += 1
            running.append(begin(kind, length, number, group))
            if chance.random() < 0.5:
                running.pop(0)()
        if chance.random() < 0.1:
            del running[:1]  # nobody waits for it
        for finish in running:
            finish()
    take_step([("all_gather", 5)], group)
    assert len(_exchanges_of(CPU, group).under_way) <= 1


@pytest.mark.ranks(3)
def test_every_row_is_right_whatever_comes(rank):
    """Numbers of messages begin again, too."""
    with mock.patch.object(exchange, "_NUM_OF_CHANNEL", 100):
        for seed in range(6):
            play(seed, group_with_delay())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("length", [16, 4_000_000])
def test_an_exchange_that_nobody_waits_for_is_passed_by_later_ones(rank, length):
    """Its size is new, or too large to be posted ahead. The receives of those after it are posted before."""
    group = group_with_delay(timeout=timedelta(seconds=10))
    for number in range(10):
        take_step(STEP[1:2], group, number)
        begin("all_gather", length + number * 8, number, group)
        take_step(STEP[1:2] * 2, group, number)
    assert not _exchanges_of(CPU, group).under_way


@pytest.mark.ranks(2)
def test_rows_of_inference_mode_may_be_waited_for_outside(rank):
    group = group_with_delay()
    with torch.inference_mode():
        finish = begin("all_gather", 3, 1, group)
    finish()


@pytest.mark.ranks(2)
def test_a_message_that_cannot_be_packed_is_an_error_of_its_exchange_alone(rank):
    group = group_with_delay()
    received = torch.empty(2, 3, 2)
    for number in range(3):
        take_step(STEP, group, number)
        with pytest.raises(RuntimeError, match="view"):
            all_gather(received, torch.zeros(2, 3).t(), group)
        all_gather(received, torch.full((3, 2), float(rank)), group).wait()
        assert received[:, 2, 1].tolist() == [0.0, 1.0]


@pytest.mark.ranks(2)
def test_profiles_begin_and_end_while_receives_are_posted(rank):
    """torch ends the record of a message when it comes, in a profile that may be over."""
    group = group_with_delay()
    for number in range(30):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            take_step(STEP, group, number)
        assert any("send" in each.key for each in profile.key_averages())


@pytest.mark.ranks(2)
def test_groups_with_the_same_connections_share_their_messages(rank):
    """A second object for a group, and a group that was forgotten, as one is whose size has changed."""
    group = group_with_delay()
    other = dist.ProcessGroup(dist.distributed_c10d._get_default_store(), rank, 2)
    backend = group._get_backend(torch.device("cpu"))
    other._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    give_delay(other)
    for number in range(20):
        take_step(STEP, other if number % 3 == 0 else group, number)
        if number == 10:
            process_group._kept.clear()
            give_delay(group)
            give_delay(other)
    assert _exchanges_of(CPU, other) is _exchanges_of(CPU, group)


@pytest.mark.ranks(3)
def test_a_rank_at_another_exchange_is_named(rank):
    """Rank 1 leaves a step's first exchange out. Others take its next message of about that size."""
    group = group_with_delay(timeout=timedelta(seconds=5))
    for number in range(4):
        take_step(STEP, group, number)
    first = _exchanges_of(CPU, group).num_begun + 1
    with pytest.raises(RuntimeError, match="where this rank needs") as error:
        take_step(STEP[rank == 1 :], group)
    texts = of_all_ranks(str(error.value))
    assert texts[0] == texts[2]
    assert texts[0] == (
        f"rank 1 of the group has sent 160 bytes as its exchange {first + 3}, an all-to-all, where this rank "
        f"needs 160 bytes (exchange {first} of the group: all-to-all)"
    )


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_a_step_out_is_waited_for(rank):
    group = group_with_delay(timeout=timedelta(seconds=3))
    for number in range(4):
        take_step(STEP, group, number)
    message = "none"
    if rank == 0:  # rank 1 goes on without it
        with pytest.raises(RuntimeError, match=r"\(exchange \d+ of the group: all-to-all\)") as error:
            take_step(STEP, group)
        message = str(error.value)
    messages = of_all_ranks(message)
    assert "Timed out" in messages[0], messages


@pytest.mark.ranks(2)
def test_a_groups_receives_end_with_it(rank):
    group = group_with_delay()
    for number in range(3):
        take_step(STEP, group, number)
    own = torch.zeros(2, 3)
    waited = all_to_all(torch.empty_like(own), own, group)
    waited.wait()
    references = [weakref.ref(group), weakref.ref(_exchanges_of(CPU, group))]
    gc.collect()
    dist.destroy_process_group(group)
    del group  # at once: the other ranks learn by a closed connection that this one has left
    assert [each() for each in references] == [None] * len(references)
    assert of_all_ranks(rank) == [0, 1]


def trained(rank, delay_ms):
    """Train two models in turns on one group: a hook changes, steps end early. Return weights."""
    os.environ[GIVEN] = delay_ms
    group = dist.new_group(timeout=timedelta(seconds=20))
    states = [QuantizationState(group, 4, 16, start_iter=1), PowerSGDState(group, 2, start_powerSGD_iter=2)]
    states[0].keep_undo, hooks = True, [quantization_hook, powerSGD_hook]
    torch.manual_seed(0)
    models = [torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(4))) for _ in states]

    def wrapped(index, which):
        made = gradcomp.DistributedDataParallel(models[index], process_group=group, bucket_cap_mb=0.003)
        made.register_comm_hook(states[which], hooks[which])
        return made

    def fail(gradient):
        raise KeyError("in the middle of a step")

    wrappers = [wrapped(0, 0), wrapped(1, 1)]
    for step in range(9):
        for index, model in enumerate(models):
            handle = models[0][1].weight.register_hook(fail) if step in (3, 6) else None
            loss = wrappers[index](torch.full((2, 24), 0.1 * (rank + step))).square().sum()
            with suppress(KeyError):
                loss.backward()
                with torch.no_grad():
                    for each in model.parameters():
                        each -= 0.01 * each.grad
            model.zero_grad()
            if handle:
                handle.remove()
                if index == 0:
                    states[0].undo_step()
                    wrappers[0] = wrapped(0, step == 6)  # at last with the other model's state
    return [each.detach().clone() for model in models for each in model.parameters()]


@pytest.mark.ranks(2)
def test_models_train_as_without(rank):
    """Between two ranks exchanges have the same bits on any links."""
    with mock.patch.object(exchange, "AHEAD_BYTES", 0):
        without = trained(rank, "0")
    assert all(map(torch.equal, without * 2, trained(rank, "0") + trained(rank, "20")))
    assert of_all_ranks([each.sum().item() for each in without])[0] == [each.sum().item() for each in without]


LEAVES = """
import os, sys, torch, torch.distributed as dist
from gradcomp.comm.exchange import all_gather, has_delay
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
own, received = torch.zeros(3), torch.empty(2, 3)
assert has_delay(own, dist.group.WORLD)
for _ in range(5):
    all_gather(received, own, dist.group.WORLD).wait()
if rank == 0:
    try:
        all_gather(received, own, dist.group.WORLD).wait()
    except RuntimeError as error:
        print(error)
"""


def test_a_process_may_end_with_receives_posted(tmp_path):
    """Its peer, which waits for it, learns of it at once."""
    start = partial(run_python, "-c", LEAVES, timeout_s=60, **{GIVEN: "50"})
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(start, rank, tmp_path / "store") for rank in ("0", "1")]
    first, last = [each.result() for each in ranks]
    assert (first.returncode, last.returncode, first.stderr, last.stderr, last.stdout) == (0, 0, "", "", "")
    assert "Connection closed by peer" in first.stdout or "Connection reset" in first.stdout
