"""Count the calls of Python that a bucket, and a parameter of a Reducer, take on the way to CUDA, on a stub.

A GPU waits for them: each takes about 1 µs on a host with cold caches. They are the same in every run.
"""

import json
import sys

import torch

from tests.programs import found_by, needs_stub_cuda

# The most calls per bucket; torch's own hooks take 18 to 20.
MOST = {"allreduce_hook": 35, "fp16_compress_hook": 80, "quantization_hook": 155, "powerSGD_hook": 160}


@needs_stub_cuda
def test_a_bucket_takes_few_calls():
    counted = found_by("-m", __name__)
    for few, many in (counted.pop("Reducer"), counted.pop("Reducer, fp16")):
        # One of a parameter's calls is the model's own, and one is torch's for hooks of nodes.
        assert 2 * 200 < len(many) - len(few) <= 6 * 200
        assert many.count("Stage.__call__") == 2  # flatten and unflatten, whatever is on the wire
    assert counted.keys() == MOST.keys()
    for name, (first, *others) in counted.items():
        assert all(each == first for each in others), name
        assert 10 < len(first) <= MOST[name], (name, first)
        # Triton's own launch looks a kernel up each time; an event is made once, and a stream set twice.
        assert "JITFunction.run" not in first
        assert "_Event.__init__" not in first
        num_switches = sum(each.endswith(".set_stream") for each in first)
        assert num_switches == (2 if name in ("quantization_hook", "powerSGD_hook") else 0), name


def main() -> None:
    from benchmarks import host_time  # installs the stub
    from gradcomp.hooks import default_hooks, powerSGD_hook, quantization_hooks

    few, large = map(host_time.ddp_bucket, ([(64, 64)] * 7, host_time.models.one_bucket("bert-large")))
    counted = {}
    for hook, state, bucket in (
        (default_hooks.allreduce_hook, None, few),
        (default_hooks.fp16_compress_hook, None, few),
        (quantization_hooks.quantization_hook, quantization_hooks.QuantizationState(bits=4), few),
        (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, 4, 2, 2), large),
    ):
        for _ in range(60):  # the first 40 compressed steps look at the sizes of gradients
            hook(state, bucket).wait()
        counted[hook.__name__] = [calls_in(lambda: hook(state, bucket).wait()) for _ in range(3)]  # noqa: B023
    for name, hook in (("Reducer", None), ("Reducer, fp16", default_hooks.fp16_compress_hook)):
        counted[name] = [calls_in(steps_of_reducer(num_params, hook)) for num_params in (100, 300)]
    json.dump(counted, sys.stdout)


def steps_of_reducer(num_params, hook):
    """Return a backward of a model, averaged in one bucket by a Reducer in its steady state."""
    from benchmarks.reducer import Model
    from gradcomp import Reducer

    model = Model([torch.zeros(8, 8) for _ in range(num_params)])
    reducer = Reducer(model.parameters(), first_bucket_cap_mb=25)
    if hook is not None:
        reducer.register_comm_hook(None, hook)
    for _ in range(3):
        model().backward()
    loss = model()
    return lambda: (loss.backward(), reducer)  # it lives as long as this function


def calls_in(function):
    names = []

    def note(frame, event, _):
        if event == "call":
            names.append(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))

    sys.setprofile(note)
    function()
    sys.setprofile(None)
    return names


if __name__ == "__main__":
    main()
