"""Nothing is replaced without a word: options by a checkpoint, one hook's file by another's, exact steps."""

from dataclasses import dataclass

import pytest
import torch

from gradcomp.compress import Compressor, CompressorState, compress_hook
from gradcomp.compress.quantized import QuantizedOptions
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState
from gradcomp.testing import run_ranks
from tests.hooks.powersgd_oracle import Bucket, random_gradient

pytestmark = pytest.mark.usefixtures("plain_torch")

SHAPES = [(40, 30), (17,)]
CHANGES = "the checkpoint changes what this state was made with"


def loaded(saved, state, caplog):
    caplog.clear()
    state.load_state_dict(saved.state_dict())
    return [text for text in caplog.messages if CHANGES in text]


def test_given_options_that_a_checkpoint_replaces(caplog):
    saved = PowerSGDState(None, 2, 20)
    (text,) = loaded(saved, PowerSGDState(None, 8, 30, factor_dtype=torch.int8), caplog)
    for change in (
        "matrix_approximation_rank from 8 to 2",
        "start_iter from 30 to 20",
        "factor_dtype from torch.int8",
    ):
        assert change in text
    assert "to use yours, assign them after load_state_dict" in text
    (text,) = loaded(QuantizationState(bits=4), QuantizationState(bits=8), caplog)
    assert "bits from 8 to 4" in text
    assert "error_feedback" not in text


def test_defaults_and_equal_options_are_replaced_silently(caplog):
    saved = PowerSGDState(None, 8, 20)
    assert loaded(saved, PowerSGDState(None), caplog) == []
    assert loaded(saved, PowerSGDState(None, 8, 20), caplog) == []
    assert loaded(QuantizationState(bits=8), QuantizationState(), caplog) == []


def test_an_option_assigned_later_is_logged(caplog):
    caplog.set_level("INFO")
    state = PowerSGDState(None, 8)
    state.matrix_approximation_rank = 4
    assert not any("changed at step" in text for text in caplog.messages)  # before the first step
    state.load_state_dict(state.state_dict() | {"iter": 70})
    state.matrix_approximation_rank = 2
    assert "PowerSGD: changed at step 70: matrix_approximation_rank from 4 to 2." in caplog.messages


def test_every_option_of_the_quantization_hook_is_assigned_or_refused():
    state = QuantizationState(bits=4)
    state.bits, state.block_size, state.uncompressed_dtype = 8, 64, torch.bfloat16
    assert state.options == QuantizedOptions(8, 64, True, torch.bfloat16)
    assert state.use_error_feedback
    with pytest.raises(ValueError, match="bits"):
        state.bits = 3
    with pytest.raises(AttributeError, match="use_error_feedback"):
        state.use_error_feedback = False


@pytest.mark.parametrize(
    ("saved", "state", "names"),
    [
        (lambda: PowerSGDState(None), QuantizationState, ("'PowerSGD'", "'quantization_hook'")),
        (QuantizationState, lambda: PowerSGDState(None), ("'quantization_hook'", "'PowerSGD'")),
    ],
)
def test_a_file_of_another_hook(saved, state, names):
    with pytest.raises(ValueError, match=f"is of {names[0]}, but this state is of {names[1]}: load it into"):
        state().load_state_dict(saved().state_dict())


def test_a_file_with_the_compressors_name_still_loads():
    """QuantizationState's files once had its compressor's name."""
    state = QuantizationState(bits=8)
    state.load_state_dict(QuantizationState(bits=8).state_dict() | {"algorithm": "QuantizedCompressor"})
    assert state.state_dict()["algorithm"] == "quantization_hook"


@dataclass(frozen=True)
class Options:
    density: float = 0.1


class Half(Compressor):
    def __init__(self, bucket, options):
        self.sent_numel = sum(bucket.numels) * options.density

    def average(self, flat, group, seed): ...

    def state(self):
        return {}

    def load(self, state): ...


def test_a_compressor_that_lacks_options_or_counts_parts_of_elements():
    def run(rank, group, options, message):
        state = CompressorState(Half, options, group)
        buckets = [Bucket(random_gradient(SHAPES, rank, step, torch.float32), SHAPES) for step in range(3)]
        for bucket in buckets[:2]:
            compress_hook(state, bucket).wait()
        with pytest.raises(TypeError, match=message):
            compress_hook(state, buckets[2])

    run_ranks(run, 2, None, "Half takes options, but CompressorState got none")
    run_ranks(run, 2, Options(), r"Half.sent_numel is 121.7\d*, but must be an int")


def said(caplog, hook, state_of, num_steps):
    """Return the lines of rank 0's states: all steps of one, then one step of another that resumes it."""

    def run(rank, group):
        state = state_of(group)
        for step in range(num_steps):
            hook(state, Bucket(random_gradient(SHAPES, rank, step, torch.float32), SHAPES)).wait()
        resumed = state_of(group)
        resumed.load_state_dict(state.state_dict())
        hook(resumed, Bucket(random_gradient(SHAPES, rank, num_steps, torch.float32), SHAPES)).wait()

    caplog.set_level("INFO", "gradcomp")
    run_ranks(run, 2)
    return [record.getMessage() for record in caplog.records if record.name == "gradcomp"]


def test_what_rank_0_says(caplog):
    lines = said(caplog, powerSGD_hook, lambda group: PowerSGDState(group, 2, 12), 14)
    assert lines[0] == "PowerSGD: exact averages until step 12"
    assert lines[1].startswith("PowerSGD compresses from step 12 on: ")
    assert lines[2].startswith("PowerSGD compresses from step 14 on: ")
    assert len(lines) == 3


def test_powersgd_that_compresses_nothing(caplog):
    said(caplog, powerSGD_hook, lambda group: PowerSGDState(group, 16, 2), 4)
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    expected = (
        "PowerSGD saves no bytes: no matrix is large enough for rank 16, as each must be compressed at least"
    )
    assert any(expected in text for text in texts)
