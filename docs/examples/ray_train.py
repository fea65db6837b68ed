"""Train with Ray Train on two CPU workers, gradients in 4 bits, twice: the second training resumes the first.

python docs/examples/ray_train.py folder
"""

import sys
import tempfile
from pathlib import Path

import ray.train
import ray.train.torch
import torch
from torch import nn

from gradcomp.frameworks import CommHook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def train(config):
    model = ray.train.torch.prepare_model(make_model())
    comm_hook = CommHook(QuantizationState(bits=4), quantization_hook)
    comm_hook.register(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = comm_hook.state

    if config["checkpoint"] is not None:
        with config["checkpoint"].as_directory() as folder:
            loaded = torch.load(f"{folder}/run.pt", map_location="cpu")
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        comm_hook.load_state_dict(loaded["compression"])

    rank = ray.train.get_context().get_world_rank()
    losses = []
    for step in range(state.iter, state.iter + 50):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    compression = comm_hook.state_dict()  # on every worker
    rate = state.compression_stats()[0]
    text = f"step {state.iter}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:.1f} times fewer bytes"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            contents = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "compression": compression,
            }
            torch.save(contents, Path(folder) / "run.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"text": text}, checkpoint=checkpoint)


def fit(folder, name, checkpoint=None):
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"checkpoint": checkpoint},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=ray.train.RunConfig(name=name, storage_path=folder),
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
    )
    result = trainer.fit()
    assert result.metrics is not None
    print(result.metrics["text"], flush=True)
    return result.checkpoint


if __name__ == "__main__":
    folder = str(Path(sys.argv[1]).absolute())  # Ray takes a relative one for an address
    fit(folder, "second", checkpoint=fit(folder, "first"))
