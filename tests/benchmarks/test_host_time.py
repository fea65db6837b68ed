"""Test the benchmark of PowerSGD's time on the host, which needs no GPU."""

from tests.programs import needs_stub_cuda, run_module


@needs_stub_cuda
def test_host_time():
    done = run_module("benchmarks.host_time", "--models", "gpt2-medium", "--calls", "20")
    assert done.returncode == 0, done.stdout
    bucket, p20, median, p80 = done.stdout.splitlines()[-1].rsplit(maxsplit=3)
    assert bucket.startswith("gpt2-medium, 10 parameters")
    assert 0 < float(p20) <= float(median) <= float(p80)
