"""Test 16-bit hooks in a Reducer on kernels: it rounds while it flattens, and does not call them."""

import pytest
import torch

from gradcomp.hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from tests.parallel.beside_torch import batch_of, gradients
from tests.reducer.models import STATIC, UNUSED, VIEW, Branches, ConvNet, MixedDtypes, loss_of, make_reducer

CASES = [(ConvNet, {}), (MixedDtypes, {}), (MixedDtypes, VIEW), (Branches, UNUSED), (Branches, STATIC)]
WIRES = [(fp16_compress_hook, torch.float16), (bf16_compress_hook, torch.bfloat16)]


def trained(rank, make_model, options, hook):
    """Return every step's gradients, of which the last are added up, and what buckets are stored in."""
    torch.manual_seed(0)
    model, results = make_model(), []
    reducer = make_reducer(model, **options)
    if options != VIEW:  # with which the hook itself raises, in backward
        with pytest.raises(TypeError, match="takes a process group or None as its state, got 'nothing'"):
            reducer.register_comm_hook("nothing", fp16_compress_hook)
    with torch.inference_mode():
        reducer.register_comm_hook(None, hook)
    for step in range(4):
        if step < 3:
            model.zero_grad()
        outputs = model(batch_of(model, rank, 0 if options == STATIC else step))
        reducer.prepare_for_backward(outputs)
        loss_of(outputs).backward()
        results += gradients(model)
    return results, [bucket.buffer.dtype for bucket in reducer.communicator.buckets]


@pytest.mark.ranks(2, interpret=True)
@pytest.mark.parametrize(("hook", "wire"), WIRES)
def test_bits_are_those_of_the_hook(rank, hook, wire):
    for make_model, options in CASES:
        results, stored = trained(rank, make_model, options, hook)
        # The Reducer doesn't know this function, and calls it.
        expected, own = trained(rank, make_model, options, lambda state, bucket: hook(state, bucket))
        for ours, theirs in zip(results, expected, strict=True):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs), (make_model, options)
        assert stored == [each if each.is_complex or options == VIEW else wire for each in own]
