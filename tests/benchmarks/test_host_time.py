"""Test the benchmark of PowerSGD's time on the host, which needs no GPU."""

from tests.programs import needs_stub_cuda, run_module


@needs_stub_cuda
def test_host_time():
    done = run_module("benchmarks.host_time", "--models", "gpt2-medium", "--calls", "20")
    assert done.returncode == 0, done.stdout
    for part in ("hook", "launches", "all_reduce", "Future", "streams", "state"):
        assert f" {part} " in done.stdout
