"""Compare the arithmetic about messages and bytes with the hooks themselves."""

import os
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import models
from gradcomp.comm import exchange
from gradcomp.hooks.named_hooks import NAMES, NamedHook
from gradcomp.plan import Network, buckets_of, collectives_of, traffic

FP32 = torch.float32
SHAPES = ((300, 200), (200,), (64, 3, 7, 7), (5, 4), ())


def sent(name, shapes, dtype=FP32):
    return traffic([shapes], NamedHook.named(name), Network(2), dtype).sent_bytes


def test_powersgds_rate_for_one_matrix():
    """(n + m) · r elements cross the wire in place of n · m."""
    n, m, r = 1024, 512, 4
    assert sent("powersgd:4", [(n, m)]) == 4 * (n + m) * r
    assert sent("powersgd:4:bf16", [(n, m)]) == 2 * (n + m) * r
    # A byte per element, and a bf16 scale per 128 elements: these lengths are whole blocks and sections.
    assert sent("powersgd:4:int8", [(n, m)]) == (1 + 2 / 128) * (n + m) * r
    assert sent("powersgd:4", [(n, m), (m,)]) == 4 * ((n + m) * r + m)
    assert sent("powersgd:4", [(8, 8)]) == 4 * 8 * 8, "a matrix that isn't worth compressing is sent whole"


def test_bytes_of_the_others_by_hand():
    n, m = 256, 512
    assert sent("none", [(n, m), (m,)]) == 4 * (n * m + m)
    assert sent("none", [(n, m)], dtype=torch.bfloat16) == 2 * n * m
    assert sent("bf16", [(n, m)]) == sent("fp16", [(n, m)]) == 2 * n * m
    assert sent("int8", [(n, m), (m,)]) == (1 + 2 / 128) * n * m + 4 * m
    assert sent("int4", [(n, m), (m,)]) == (1 / 2 + 2 / 128) * n * m + 4 * m


class SentMeter(TorchDispatchMode):
    """Counts this rank's messages, its all-reduces, and the bytes that it sends in both."""

    def __init__(self):
        super().__init__()
        self.num_messages, self.num_all_reduces, self.num_bytes = 0, 0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name == "send":
            self.num_messages += 1
            has_heading = args[3] >= exchange._FIRST_OF_CHANNELS
            self.num_bytes += args[0][0].nbytes - exchange._HEADING_BYTES * has_heading
        elif name == "allreduce_":
            self.num_all_reduces += 1
            size = dist.ProcessGroup.unbox(args[1]).size()
            self.num_bytes += 2 * (size - 1) / size * args[0][0].nbytes
        else:
            assert func.namespace != "c10d" or name == "recv_"
        return func(*args, **(kwargs or {}))


def count_sent(rank, names, per_node, round_trip_ms):
    """Return by hook what a rank sends in a DDP step, and what plan says: messages, all-reduces, bytes."""
    os.environ["GRADCOMP_ROUND_TRIP_MS"] = str(round_trip_ms)
    counted, expected, size = {}, {}, dist.get_world_size()
    network = Network(size, round_trip_s=round_trip_ms / 1e3, ranks_per_node=per_node, backend="gloo")
    for name in names:
        # The last layers' tensors are sent exactly by PowerSGD: 280 kB each.
        widths = (300, 200, 700, 130, 1, 70_000)
        model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.3)
        hook = NamedHook.form_named(name)
        if name != "none":
            ddp.register_comm_hook(*hook.state_and_hook(2, per_node if hook.is_hierarchical else 1))
        for _ in range(3):  # buckets are rebuilt, the state compares its ranks
            ddp(torch.randn(2, 300)).sum().backward()
        with SentMeter() as meter:
            ddp(torch.randn(2, 300)).sum().backward()
        counted[name] = (meter.num_messages, meter.num_all_reduces, meter.num_bytes)
        buckets = buckets_of([tuple(each.shape) for each in model.parameters()], cap_bytes=0.3 * 2**20)
        assert len(buckets) > 1
        collectives = [
            each for bucket in buckets for each in collectives_of(hook, tuple(bucket), FP32, network)
        ]
        sizes = {"all": size, "within": per_node, "between": size // per_node}
        all_reduces = [each for each in collectives if each.kind == "all-reduce"]
        num_bytes = 0.0
        for each in collectives:
            own = each.num_bytes / (per_node if each.group == "between" else 1)
            passes = 2 if each.kind == "all-reduce" else 1
            num_bytes += passes * (1 - 1 / sizes[each.group]) * own
        messages = sum(sizes[each.group] - 1 for each in collectives if each not in all_reduces)
        expected[name] = (messages, len(all_reduces), num_bytes)
    return counted, expected


@pytest.mark.parametrize(
    ("world_size", "per_node", "round_trip_ms"),
    [(2, 1, 0), (2, 1, 20), (4, 1, 0), (4, 1, 20), (4, 2, 0), (4, 2, 20)],
)
def test_hooks_send_these_messages_and_bytes(run_ranks, world_size, per_node, round_trip_ms):
    tried = NAMES if world_size == 2 else ("none", "fp16", "int8", "int4", "powersgd:4", "powersgd:16:int8")
    names = [f"{name} hierarchical" for name in tried] if per_node > 1 else tried
    ranks = run_ranks(count_sent, world_size, names, per_node, round_trip_ms)
    for name in names:
        expected = ranks[0][1][name]
        for counted, _ in ranks:
            assert counted[name][:2] == expected[:2], name
        # The last shard may be smaller; the last piece of a node's sum of factors is padded.
        sent = sum(counted[name][2] for counted, _ in ranks) / world_size
        assert sent == pytest.approx(expected[2], rel=1e-9 if per_node == 1 else 1e-5), name


def test_bert_is_compressed_as_documented():
    """docs/choosing.md: 16 bits half, int4 7.8 times fewer at most, PowerSGD hundreds of times."""
    buckets = models.buckets("bert-large")
    total = {name: traffic(buckets, NamedHook.named(name), Network(2)).sent_bytes for name in NAMES}
    assert total["none"] == 2 * total["bf16"] == 4 * 335_141_888
    assert 7.5 < total["none"] / total["int4"] < 7.8
    assert total["none"] / total["powersgd:1:int8"] > 500
