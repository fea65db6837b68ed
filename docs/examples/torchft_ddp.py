"""Train replicas that may come and go, gradients in 4 bits: a lighthouse, and a call for every replica.

torchft_lighthouse --min_replicas 2 --join_timeout_ms 1000
export TORCHFT_LIGHTHOUSE=http://localhost:29510
torchrun --standalone --max-restarts 9 docs/examples/torchft_ddp.py 0
"""

import sys
from datetime import timedelta

import torch
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

from gradcomp.frameworks.torchft import DistributedDataParallel
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


def main(replica):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = QuantizationState(bits=4)

    def save():
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def load(saved):
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["optimizer"])

    pg = ProcessGroupGloo(timeout=timedelta(seconds=20))
    manager = Manager(
        pg=pg,
        load_state_dict=load,
        state_dict=save,
        min_replica_size=2,
        timeout=timedelta(seconds=20),
        replica_id=f"replica_{replica}",
    )
    ddp = DistributedDataParallel(manager, pg, model, state, quantization_hook)
    optimizer = Optimizer(manager, adam)  # torchft's

    losses = []
    while manager.current_step() < 50:
        seed = 100 * manager.current_step() + replica
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()  # begins a quorum
        loss = nn.functional.mse_loss(ddp(x), x.roll(1, dims=1))
        loss.backward()
        optimizer.step()  # unless a replica has reported an error
        losses.append(loss.item())
    rate = state.compression_stats()[0]
    print(f"step {state.iter}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:.1f} times fewer bytes")
    manager.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
