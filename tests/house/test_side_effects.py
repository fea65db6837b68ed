"""Check that importing gradcomp changes nothing outside of it."""

from tests.programs import run_python

PROBE = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
before = dict(c10d._world.pg_map), c10d._world.default_pg, dist.is_initialized()
random_state = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
{imports}
now = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
unchanged = {{
    "initialized CUDA": not torch.cuda.is_initialized(),
    "process groups": (dict(c10d._world.pg_map), c10d._world.default_pg, dist.is_initialized()) == before,
    "torch's settings": torch.equal(now[0], random_state[0]) and now[1:] == random_state[1:],
    "test packages": "hypothesis" not in sys.modules and "pytest" not in sys.modules,
}}
print(*(name for name, holds in unchanged.items() if not holds), sep="\\n", end="")
"""


def probe(imports: str) -> list[str]:
    """Return what these imports change in a new process; a warning is an error there."""
    run = run_python("-W", "error", "-c", PROBE.format(imports=imports))
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_importing_has_no_side_effects():
    assert probe("import gradcomp, gradcomp.ops, gradcomp.hooks.default_hooks") == []


def test_side_effects_are_found():
    everything = """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.cuda.is_initialized = lambda: True
torch.rand(1)
import hypothesis
"""
    assert probe(everything) == ["initialized CUDA", "process groups", "torch's settings", "test packages"]
