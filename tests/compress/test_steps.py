"""Test states whose buckets don't say which is a step's last, and the indices of their parameters."""

import logging

import pytest
import torch

from gradcomp.compress.grad_bucket import GradBucket
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.distributed.ranks import run_ranks


def average(state, index, parameter, is_last=False):
    buffer = torch.ones(parameter.numel())
    quantization_hook(state, GradBucket(index, buffer, [parameter], is_last)).wait()


def end_steps(rank):
    """Run steps of two buckets, none of which is the last; return what the state says after each."""
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


def test_whoever_knows_the_end_of_a_step_ends_it():
    ((steps, messages, is_compared),) = run_ranks(end_steps, 1)
    assert steps == [((n, n > 0), (n + 1, True)) for n in range(4)]
    assert messages == [
        "Start to apply QuantisedCompressor after 1 iterations.",
        "Compression stats: iter 1",
        "Compression stats: iter 3",
    ]
    assert not is_compared  # the group may be another one


def number(rank):
    """Return the parameters' indices in the order in which buckets bring them, numbered before or not."""
    found = []
    for numbers_before in (True, False):
        state = QuantizationState(None)
        first, second = torch.zeros(256, 2), torch.zeros(3)
        if numbers_before:
            state.number_parameters([second, first])
        average(state, 0, first)
        average(state, 1, second, is_last=True)
        found.append([memory["parameters"] for memory in state.state_dict()["buckets"].values()])
        with pytest.raises(ValueError, match="make one state per model"):
            state.number_parameters([first])
    return found


def test_parameters_may_have_their_indices_before_a_bucket_brings_them():
    assert run_ranks(number, 1) == [[[[1], [0]], [[0], [1]]]]
