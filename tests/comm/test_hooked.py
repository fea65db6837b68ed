"""What a hook's state can do, for states of every kind."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from gradcomp.comm.bucket import Hooked
from gradcomp.hooks.default_hooks import allreduce_hook
from gradcomp.hooks.quantization_hooks import QuantizationState


@pytest.mark.usefixtures("group_of_one")
def test_states_of_every_kind_get_another_group_and_what_they_can_take():
    group, own, torchs = dist.group.WORLD, {"mine": 1}, SimpleNamespace(process_group=None)
    for state in (None, group, QuantizationState(), torchs, own):
        hooked = Hooked(allreduce_hook, state)
        assert hooked.group is (group if state is group else None)
        after = hooked.regroup(group)
        assert after.group is (None if state is own else group)
        assert after.state is (group if state is None or state is group else state)
        after.tell("number_parameters", [])
        after.undo(None)  # nobody keeps anything to take back
        assert after.keep_undo is (False if isinstance(state, QuantizationState) else None)
        assert after.step == (0 if isinstance(state, QuantizationState) else None)


def test_undoing_leaves_a_comparison_that_is_due():
    for compared_in in (None, 3):
        state = SimpleNamespace(keep_undo=True, is_compared=True, compared_in=compared_in, undo_step=print)
        Hooked(allreduce_hook, state).undo(None, all_know=True)
        assert state.compared_in == (compared_in and -1)
