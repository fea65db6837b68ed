"""A compressor is warmed up once per bucket, in a plain step."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from gradcomp import ops
from gradcomp.compress import BucketSpec, Compressor, CompressorState, compress_hook, quantized_all_reduce
from gradcomp.compress.powersgd import PowerSGDCompressor, PowerSGDOptions
from gradcomp.compress.quantized import QuantizedCompressor, QuantizedOptions
from gradcomp.hooks import powerSGD_hook as powersgd
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.hooks.powersgd_oracle import Bucket
from tests.hooks.powersgd_runs import simulate


class Noted(Compressor):
    """A compressor that averages nothing, and notes the calls."""

    calls: list[tuple] = []  # noqa: RUF012 emptied by each test

    def __init__(self, bucket, options):
        self.calls.append(("made", bucket.shapes))

    @classmethod
    def warm_up(cls, bucket, options):
        cls.calls.append(("warmed up", bucket.shapes))

    def average(self, flat, group, seed):
        pass

    def state(self):
        return {}

    def load(self, state):
        pass


def train(rank, make_state, hook, num_steps):
    state = make_state()
    buckets = [Bucket(torch.ones(36), [(5, 6), (6,)], 0, False), Bucket(torch.ones(80), [(8, 10)], 1, True)]
    for _ in range(num_steps):
        for bucket in buckets:
            hook(state, bucket).wait()


def test_once_per_bucket_before_it_is_made():
    Noted.calls.clear()
    simulate(train, 1, lambda: CompressorState(Noted, start_iter=3), compress_hook, 5)
    buckets = [((5, 6), (6,)), ((8, 10),)]
    assert Noted.calls == [(what, shapes) for what in ("warmed up", "made") for shapes in buckets]


def test_powersgd_compiles_for_its_options(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        "gradcomp.ops.compile_powersgd", lambda layout, *rest, **options: compiled.append(options)
    )

    def make_state():
        return powersgd.PowerSGDState(None, 2, start_powerSGD_iter=2, orthogonalization_epsilon=0.5)

    simulate(train, 2, make_state, powersgd.powerSGD_hook, 3)
    assert compiled
    assert all(
        options == {"error_feedback": True, "warm_start": True, "epsilon": 0.25, "wire_dtype": None}
        for options in compiled
    )


@pytest.mark.parametrize("hook", [powersgd.powerSGD_hook, powersgd.batched_powerSGD_hook])
def test_powersgd_compiles_once_per_bucket_in_a_quantized_start(hook, monkeypatch):
    """The compressed steps' kernels compile while the bucket's first quantized all-reduce is under way."""
    events = []

    def note(module, name, event):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *each, **options: (events.append(event), original(*each, **options))[1]
        )

    note(ops, "compile_powersgd", "compiled")
    note(ops, "powersgd_plan", "made")
    note(quantized_all_reduce.Codes, "exchange", "quantized")
    make_state = partial(powersgd.PowerSGDState, None, 2, start_powerSGD_iter=3, start_bits=4)
    simulate(train, 1, make_state, hook, 5)
    assert events == ["quantized", "compiled"] * 2 + ["quantized"] * 4 + ["made"] * 2


class Compiled:
    """Notes the operations that are made on the meta device and compiled, in place of compiling them."""

    def __init__(self, monkeypatch):
        self.compiled = []
        monkeypatch.setattr("gradcomp.compress.quantized_all_reduce.has_streams", lambda device: True)
        for name in ("encoder", "adder", "decoder"):
            make = partial(self.make, name, getattr(ops, name))
            monkeypatch.setattr(ops, name, make)

    def make(self, name, make, layout, dtype, device, **options):
        if device.type != "meta":
            return make(layout, dtype, device, **options)
        note = (name, layout.world_size, dtype, options)
        return SimpleNamespace(compile=lambda _: self.compiled.append(note))


def test_the_quantized_all_reduce_compiles_for_its_options(monkeypatch):
    compiled = Compiled(monkeypatch).compiled
    simulate(train, 2, partial(QuantizationState, None, 8, 4, False, start_iter=2), quantization_hook, 3)
    # Two buckets on two ranks, in one exchange.
    assert [each[:3] for each in compiled] == [(name, 1, torch.float32) for name in ("encoder", "adder")] * 4
    options = {"bits": 8, "error_feedback": False, "averages_dtype": torch.float32}
    assert compiled[0][3] == options | {"uncompressed_dtype": None}
    assert compiled[1][3].items() >= {**options, "num_payloads": 2, "has_own": False}.items()


def test_hierarchical_the_kernels_of_all_operations_compile(monkeypatch):
    """With nodes, int8 factors are quantized in pieces."""
    compiled = Compiled(monkeypatch).compiled
    monkeypatch.setattr("gradcomp.ops.compile_powersgd", lambda *_, **options: compiled.append(options))
    options = PowerSGDOptions(factor_dtype=torch.int8)
    bucket = BucketSpec(((5, 6), (6,)), torch.float32, torch.device("cpu"), 9, 0, ranks_per_node=3)
    PowerSGDCompressor.warm_up(bucket, options)
    # Three nodes average pieces of gradients that were multiplied by a quarter.
    _, encoder, adder, decoder = compiled
    assert [each[:2] for each in (encoder, adder, decoder)] == [("encoder", 3), ("adder", 1), ("decoder", 9)]
    assert (adder[3]["num_payloads"], adder[3]["divisor"]) == (3, 9 / 4)
    compiled.clear()
    QuantizedCompressor.warm_up(replace(bucket, world_size=6), QuantizedOptions())
    assert [each[:2] for each in compiled] == [("encoder", 1), ("adder", 1)]
    assert compiled[1][3]["num_payloads"] == 2
    compiled.clear()
    PowerSGDCompressor.warm_up(replace(bucket, ranks_per_node=1), options)
    assert [type(each) for each in compiled] == [dict, tuple, tuple, tuple]
