"""Test states whose buckets never report is_last()."""

import logging

import torch

from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


def average(state, index, parameter, is_last=False):
    buffer = torch.ones(parameter.numel())
    quantization_hook(state, GradBucket(index, buffer, [parameter], is_last)).wait()


def end_steps(rank):
    """Run steps of two buckets without is_last; return the state's counts, its log, and is_compared."""
    state = QuantizationState(None, start_iter=1, compression_stats_logging_frequency=2)
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage().partition(", total")[0])
    logger = logging.getLogger("gradcomp.hooks.quantization_hooks")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    parameters = [torch.zeros(256, 2), torch.zeros(3)]
    steps = []
    for _ in range(4):
        for index, parameter in enumerate(parameters):
            average(state, index, parameter)
        before = state.iter, state.is_compared
        state.end_step()
        steps.append((before, (state.iter, state.is_compared)))
    state.process_group = None
    return steps, messages, state.is_compared


def test_whoever_knows_the_end_of_a_step_ends_it(run_ranks):
    ((steps, messages, is_compared),) = run_ranks(end_steps, 1)
    assert steps == [((n, n > 0), (n + 1, True)) for n in range(4)]
    assert messages == ["Compression stats: iter 1", "Compression stats: iter 3"]
    assert not is_compared  # the group may be another one
