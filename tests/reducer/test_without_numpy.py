"""Test that training works without numpy: only torch and triton are required."""

from tests.programs import ROOT, TORCHRUN, run_python

SCRIPT = """
import io, sys
import torch
import torch.distributed as dist
from torch import nn
import gradcomp
from gradcomp.hooks import default_hooks, powerSGD_hook

dist.init_process_group("gloo")
rank = dist.get_rank()


def saved_and_loaded(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def main():
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
    hooks = [
        None,
        (None, default_hooks.fp16_compress_hook),
        (None, default_hooks.bf16_compress_hook),
        (state, powerSGD_hook.powerSGD_hook),
    ]
    for hook in hooks:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 3))
        ddp = gradcomp.DistributedDataParallel(model, find_unused_parameters=hook is None)
        if hook is not None:
            ddp.register_comm_hook(*hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for _ in range(3 + rank):
                optimizer.zero_grad()
                ddp(torch.randn(5, 30)).square().mean().backward()
                optimizer.step()
        ddp = saved_and_loaded(ddp, weights_only=False)
        ddp(torch.randn(5, 30)).square().mean().backward()
    gathered = [torch.empty_like(ddp.module[0].weight.grad) for _ in range(2)]
    dist.all_gather(gathered, ddp.module[0].weight.grad)
    assert torch.equal(*gathered)
    saved_and_loaded(state.state_dict())
    gradcomp.average_([torch.ones(3)])


main()
dist.destroy_process_group()
assert "numpy" not in sys.modules
print("done")
"""


def test_training_without_numpy(tmp_path):
    (tmp_path / "numpy").mkdir()
    # Python raises this error if numpy is absent. torch's import of numpy accepts only this error.
    absent = 'raise ModuleNotFoundError("No module named \'numpy\'", name="numpy")'
    (tmp_path / "numpy" / "__init__.py").write_text(absent)
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_python(*TORCHRUN, tmp_path / "train.py", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
