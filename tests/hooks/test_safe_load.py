"""With the globals that gradcomp declares safe for torch.load, a file can make a state, and nothing else."""

import io
import pickle
import sys
import zipfile
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist

from gradcomp.comm import bucket as kept
from gradcomp.comm import exchange
from gradcomp.hooks import debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks
from gradcomp.hooks.auto_hook import AutoState, auto_hook
from tests.hooks.powersgd_runs import reload

HOOKS = [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook]
HOOKS += [debugging_hooks.noop_hook, powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook]
HOOKS += [quantization_hooks.quantization_pertensor_hook, quantization_hooks.quantization_perchannel_hook]
COLLECTIVES = [
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "new_group", "reduce", "reduce_scatter", "scatter", "scatter_object_list", "send", "recv",
    "init_process_group", "destroy_process_group",
]  # fmt: skip
STATE = powerSGD_hook.PowerSGDState
QuantizationState = quantization_hooks.QuantizationState


@pytest.fixture
def nothing_communicates(monkeypatch, group_of_one):
    """Run a test in a process group where every collective raises an error, and is noted."""
    called = []

    def note(name):
        def refuse(*_, **__):
            called.append(name)
            raise AssertionError(f"a file called {name}")

        return refuse

    for name in COLLECTIVES:
        for module in (dist, dist.distributed_c10d):
            monkeypatch.setattr(module, name, note(name))
    for name in ("allreduce", *exchange._OF_GROUP):  # which hooks call
        monkeypatch.setattr(dist.ProcessGroup, name, note(name))
    wires, safe, random = len(kept._wires.by_parameter), _safe_globals(), torch.get_rng_state()
    loggers = [module.logger.level for module in (powerSGD_hook,)]
    yield
    monkeypatch.undo()
    assert called == []
    assert (len(kept._wires.by_parameter), _safe_globals()) == (wires, safe)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.logger.level for module in (powerSGD_hook,)] == loggers


def _safe_globals():
    return {
        f"{each.__module__}.{each.__qualname__}"
        for each in torch.serialization.get_safe_globals()
        if not isinstance(each, tuple) and each.__module__.startswith("gradcomp")
    }


class Call:
    """An object that is pickled as a function call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Built(OrderedDict):
    """An object that is pickled as an OrderedDict with attributes that the file chooses."""

    def __init__(self, **attributes):
        super().__init__()
        self.chosen = attributes

    def __reduce__(self):
        return OrderedDict, (), self.chosen


def load_raw(opcodes):
    """Load these opcodes as the pickle in a file of torch.save's format."""
    file, archive = io.BytesIO(), io.BytesIO()
    torch.save(None, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(archive, "w") as new:
        for name in old.namelist():
            new.writestr(name, opcodes if name.endswith("/data.pkl") else old.read(name))
    archive.seek(0)
    return torch.load(archive, weights_only=True)


def test_what_is_safe():
    """No other global is safe. Review a new one before you add it here."""
    safe = (STATE, QuantizationState, AutoState, auto_hook, *HOOKS)
    importable = {f"{each.__module__}.{each.__qualname__}" for each in safe}
    assert _safe_globals() == importable
    for name in importable:
        module, _, attribute = name.rpartition(".")
        assert getattr(sys.modules[module], attribute) in safe


@pytest.mark.usefixtures("nothing_communicates")
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__qualname__)
def test_a_file_cannot_run_a_hook(hook):
    """It can't fake a bucket either, though it chooses an OrderedDict's attributes."""
    given = torch.ones(6)
    methods = {
        "buffer": torch.FloatTensor,
        "parameters": torch.Size,
        "index": OrderedDict,
        "is_last": OrderedDict,
    }
    for state in (None, torch.ones(1), Call(STATE, None, 1, 0, 2, False, False)):
        for bucket in (given, None, OrderedDict(buffer=given), Built(**methods), Call(STATE, None)):
            with pytest.raises(TypeError, match=r"takes a torch\.distributed\.GradBucket"):
                reload(Call(hook, state, bucket))
    assert given.tolist() == [1.0] * 6
    with pytest.raises(TypeError):
        reload(Call(hook))


ODD = [
    *[
        (),
        (None, 0),
        (None, 1, 1),
        (None, float("nan")),
        ("gloo",),
        (-100,),
        (torch.ones(2),),
        (None, None, None),
    ],
    *[({},), (None, {}, {}), (None, 1, 1000, float("nan")), (None, *[2] * 9), (None, *[2] * 20)],
]


@pytest.mark.usefixtures("nothing_communicates")
@pytest.mark.parametrize("arguments", ODD, ids=str)
def test_a_file_cannot_make_an_odd_state(arguments):
    with pytest.raises((TypeError, ValueError)):
        reload(Call(STATE, *arguments))


def good_state_dict():
    return STATE(None).state_dict()


HOSTILE = [
    *[None, [], {}, "state", 7, {"iter": 3}, OrderedDict(), ({}, {"process_group": None})],
    *[{"__class__": "x"}, {"process_group": "gloo"}, {"load_state_dict": None}],
    *[{**good_state_dict(), name: []} for name in good_state_dict()],
    {**good_state_dict(), "process_group": None},
    {**good_state_dict(), "_states": {}},
    {**good_state_dict(), "parameters": {0: {}}},
]


@pytest.mark.usefixtures("nothing_communicates")
@pytest.mark.parametrize("state", HOSTILE, ids=lambda each: str(each)[-60:])
def test_a_file_cannot_build_an_odd_state(state):
    """BUILD sets the state of an object made by its constructor (REDUCE) or without it (NEWOBJ)."""
    built = pickle.dumps(state, 2)[2:-1] + b"b."
    for opcode, arguments in ((b"R", (None,)), (b"\x81", ())):
        made = b"\x80\x02cgradcomp.hooks.powerSGD_hook\nPowerSGDState\n"
        made += pickle.dumps(arguments, 2)[2:-1] + opcode
        with pytest.raises((TypeError, ValueError, KeyError)):
            load_raw(made + built)
    with pytest.raises(pickle.UnpicklingError, match="Can only build"):
        load_raw(b"\x80\x02cgradcomp.hooks.powerSGD_hook\npowerSGD_hook\n" + built)


def test_a_quantization_state_is_loaded():
    state = QuantizationState(None, 8, 64, start_iter=3, uncompressed_dtype=torch.bfloat16)
    loaded = reload(state)
    assert (loaded.options, loaded.start_iter) == (state.options, 3)


@pytest.mark.usefixtures("nothing_communicates")
@pytest.mark.parametrize(
    "name", ["load_from_dcp", "consolidated_state_dict", "average_errors", "logger", "dist"]
)
def test_a_file_cannot_name_anything_else(name):
    with pytest.raises(pickle.UnpicklingError, match="was not an allowed global by default"):
        load_raw(f"\x80\x02cgradcomp.hooks.powerSGD_hook\n{name}\n.".encode("latin-1"))
