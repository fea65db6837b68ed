"""Test that if PowerSGD differs between ranks, every rank's first step raises an error that says how."""

from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import default_hooks, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.hooks.powersgd_oracle import Bucket
from tests.hooks.powersgd_runs import Messages
from tests.ranks import RankError, of_all_ranks, simulate

PLAIN, BATCHED = powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook
OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3}
BF16 = default_hooks.bf16_compress_wrapper(PLAIN)
# Rank 1's option, hook or shapes in the bucket (not the other ranks'), and the message.
DIFFERENT = [
    ({"matrix_approximation_rank": 4}, "matrix_approximation_rank is 2 on ranks 0, 2 and 4 on rank 1"),
    ({"start_powerSGD_iter": 2}, "start_powerSGD_iter is 3 on ranks 0, 2 and 2 on rank 1"),
    ({"min_compression_rate": 1.5}, "min_compression_rate is 2.0 on ranks 0, 2 and 1.5 on rank 1"),
    ({"orthogonalization_epsilon": 1e-8}, "orthogonalization_epsilon is 0.0 on ranks 0, 2 and 1e-08"),
    ({"use_error_feedback": False}, "use_error_feedback is true on ranks 0, 2 and false on rank 1"),
    ({"warm_start": False}, "warm_start is true on ranks 0, 2 and false on rank 1"),
    ({"factor_dtype": torch.int8}, 'factor_dtype is null on ranks 0, 2 and "torch.int8" on rank 1'),
    ({"random_seed": 5}, "random_seed is 0 on ranks 0, 2 and 5 on rank 1"),
    (BATCHED, 'hook is "powerSGD_hook" on ranks 0, 2 and "batched_powerSGD_hook" on rank 1'),
    (BF16, 'is "torch.float32" on ranks 0, 2 and "torch.bfloat16"'),
    ([(6, 4), (3,)], "the number of shapes in the bucket is 1 on ranks 0, 2 and 2 on rank 1"),
    ([(8, 3)], "shapes in the bucket[0] is [6, 4] on ranks 0, 2 and [8, 3] on rank 1"),
]


@pytest.mark.simulated_ranks(3)
def test_a_different_option_is_named_on_every_rank(rank):
    said = []
    for change, _ in DIFFERENT:
        change = change if rank == 1 else {}
        hook = change if callable(change) else PLAIN
        shapes = change if isinstance(change, list) else [(6, 4)]
        state = powerSGD_hook.PowerSGDState(None, **OPTIONS | (change if isinstance(change, dict) else {}))
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        try:
            hook(state, Bucket(torch.ones(numel), shapes)).wait()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
        same = powerSGD_hook.PowerSGDState(None, **OPTIONS)
        for _ in range(2):
            assert torch.equal(
                PLAIN(same, Bucket(torch.full((24,), float(rank)), [(6, 4)])).wait(), torch.ones(24)
            )
    for (_, expected), message in zip(DIFFERENT, said, strict=True):
        assert expected in message
        assert "Give every rank the same" in message


def test_checkpoints_of_different_steps(caplog):
    """Their ranks are refused; with the same step, their directions begin again."""
    simulate(load_different_steps, 2)
    said = [line for line in caplog.messages if "directions" in line]
    assert len(said) == 2
    assert "hook: the ranks have unlike directions, from steps in other groups" in said[0]


def load_different_steps(rank):
    """Load a later checkpoint on rank 1 than on rank 0, then one with other directions."""
    saved = []
    state = powerSGD_hook.PowerSGDState(None, 1, 2)
    for step in range(5):
        PLAIN(
            state, Bucket(torch.randn(600, generator=torch.Generator().manual_seed(step)), [(30, 20)])
        ).wait()
        saved.append(state.state_dict())
    loaded = powerSGD_hook.PowerSGDState(None)
    loaded.load_state_dict(saved[3 + rank])
    with pytest.raises(RuntimeError, match="iter is 4 on rank 0 and 5 on rank 1"):
        PLAIN(loaded, Bucket(torch.ones(600), [(30, 20)])).wait()
    loaded.load_state_dict(saved[4] | {"parameters": saved[3 + rank]["parameters"]})
    PLAIN(loaded, Bucket(torch.ones(600), [(30, 20)])).wait()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("start", [2, 1000])
def test_bucket_caps_that_differ_in_later_buckets_are_named_under_torchs_ddp(rank, start):
    """Let only later buckets differ. With find_unused_parameters, torch does not rebuild buckets."""
    layers = [nn.Linear(n, m, bias=False) for n, m in pairwise([256, 256, 256, 512, 128])]
    ddp = DistributedDataParallel(
        nn.Sequential(*layers), find_unused_parameters=True, bucket_cap_mb=0.3 if rank else 0.2
    )
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=start), PLAIN)
    with pytest.raises(RuntimeError, match=r"shapes in the bucket.* on rank 0 and .* on rank 1"):
        ddp(torch.randn(2, 256)).sum().backward()


def different_ranks_of_a_subgroup(rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        return ""
    state = powerSGD_hook.PowerSGDState(group, rank, 2)
    with pytest.raises(RuntimeError) as raised:
        powerSGD_hook.powerSGD_hook(state, Bucket(torch.ones(4)))
    return str(raised.value)


def test_ranks_of_a_subgroup_are_named_as_everywhere():
    for message in simulate(different_ranks_of_a_subgroup, 3)[1:]:
        assert "matrix_approximation_rank is 1 on rank 1 and 2 on rank 2" in message


def different_groups(rank):
    own = [dist.new_group([each]) for each in range(2)]
    model = DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(powerSGD_hook.PowerSGDState(own[1] if rank == 1 else None), PLAIN)
    dist.group.WORLD.get_group_store().set_timeout(timedelta(seconds=2))
    del distributed_c10d._get_default_store  # torch may rename what is private
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()


def test_states_of_different_groups_end_with_an_error(run_ranks):
    with pytest.raises(RankError) as raised:
        run_ranks(different_groups, 2)
    assert "on rank 0 averages over ranks [0, 1], but these have not come" in str(raised.value)
    assert "rank 1, which averages over ranks [1]" in str(raised.value)


@pytest.mark.ranks(2)
def test_unlike_cpus_are_said(rank):
    with pytest.MonkeyPatch.context() as patch, Messages("gradcomp") as said:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: ["AVX2", "AVX512"][rank])
        PLAIN(powerSGD_hook.PowerSGDState(None), Bucket(torch.ones(6))).wait()
    (line,) = [line for line in said if "unlike processors" in line]
    assert 'CPU capability is "AVX2" on rank 0 and "AVX512" on rank 1' in line


@pytest.mark.ranks(2)
def test_unlike_cpus_are_not_said_of_a_quantized_all_reduce(rank):
    """Take a quantized step on unlike CPUs: every rank dequantizes the same bytes."""
    with pytest.MonkeyPatch.context() as patch, Messages("gradcomp") as said:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: ["AVX2", "AVX512"][rank])
        bucket = Bucket(torch.randn(300, generator=torch.Generator().manual_seed(rank)), [(30, 10)])
        average = quantization_hook(QuantizationState(bits=4), bucket).wait()
    (said, average), (others, theirs) = of_all_ranks((said, average))
    assert not any("unlike processors" in line for line in (*said, *others))
    assert torch.equal(average, theirs)
