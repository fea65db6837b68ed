"""Test states whose buckets never report is_last()."""

import pytest
import torch

from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


def average(state, index, parameter, is_last=False):
    buffer = torch.ones(parameter.numel())
    quantization_hook(state, GradBucket(index, buffer, [parameter], is_last)).wait()


def changed_between_steps(rank):
    """Take steps that no bucket ends, and change something before each; return the messages of the next."""
    parameters = [torch.zeros(256, 2), torch.zeros(3)]
    messages = []
    for name, values in (("random_seed", (0, 1)), ("ranks_per_node", (1, 2)), ("start_iter", (5, 6))):
        state = QuantizationState(None, start_iter=1)
        for _ in range(3):
            for index, parameter in enumerate(parameters):
                average(state, index, parameter)
        setattr(state, name, values[rank])
        assert not state.is_compared
        with pytest.raises(RuntimeError) as raised:
            average(state, 0, parameters[0])
        messages.append(str(raised.value))
        setattr(state, name, values[0])
        for step in range(2):
            average(state, 0, parameters[0])
            assert state.is_compared == (step > 0)
    return messages


def test_a_change_between_two_steps_is_compared_although_no_bucket_ends_a_step(run_ranks):
    for seed, nodes, start in run_ranks(changed_between_steps, 2):
        assert "random_seed is 0 on rank 0 and 1 on rank 1" in seed
        assert "averages without nodes) is 1 on rank 0 and 2 on rank 1" in nodes
        assert "start_iter is 5 on rank 0 and 6 on rank 1" in start
