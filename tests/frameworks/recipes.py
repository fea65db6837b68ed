"""Shared by the tests of recipes and of their pages: each page's recipe, and a function that runs recipes."""

import re

from tests.programs import ROOT, run_python

EXAMPLES = ROOT / "docs" / "examples"
PAGES = {
    "frameworks/accelerate.md": "accelerate_loop.py",
    "frameworks/fabric.md": "lightning_fabric.py",
    "frameworks/lightning.md": "lightning_trainer.py",
    "frameworks/local_steps.md": "local_steps.py",
    "frameworks/mixed_precision.md": "mixed_precision.py",
    "frameworks/ray.md": "ray_train.py",
    "frameworks/torch_compile.md": "torch_compile.py",
    "frameworks/torchft.md": "torchft_ddp.py",
    "frameworks/torchrun.md": "torchrun_ddp.py",
    "frameworks/transformers.md": "transformers_trainer.py",
    "frameworks/zero_redundancy.md": "zero_redundancy.py",
}
# Blocks of these pages need code that only the recipe has, or a test.
IN_RECIPES = ["accelerate", "fabric", "lightning", "mixed_precision", "ray", "torchft", "transformers"]
LINE = re.compile(r"step (\d+): loss ([\d.]+) to ([\d.]+), ([\d.]+) times fewer bytes")


def run(*command, folder, timeout_s=300, **environment):
    """Run an example; return its output, and (step, first loss, last loss, times fewer bytes) of each run."""
    environment |= {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder),
        "ACCELERATE_DYNAMO_BACKEND": "no",
    }
    done = run_python(*command, timeout_s=timeout_s, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, [tuple(map(float, found)) for found in LINE.findall(done.stdout)]
