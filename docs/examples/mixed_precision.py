"""Train in fp16 with a GradScaler: the errors that compression keeps follow its scale and its skipped steps.

torchrun --nproc-per-node 2 docs/examples/mixed_precision.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.frameworks import CommHook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


def main():
    dist.init_process_group("gloo")
    device = "cpu"  # "cuda" on GPUs
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(
        device, init_scale=2.0**24, growth_interval=10
    )  # too large for fp16 at first
    state = QuantizationState(bits=4)
    comm_hook = CommHook(state, quantization_hook)
    comm_hook.register(model)

    losses, scales = [], []
    for step in range(60):
        comm_hook.follow(scaler)  # at the beginning of every step
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        with torch.autocast(device, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
        scaler.step(optimizer)
        scaler.update()

    if dist.get_rank() == 0:
        rate = state.compression_stats()[0]
        print(f"step {step + 1}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:.1f} times fewer bytes")
        print(f"scales {sorted(set(scales))}")
    dist.barrier()
    del model  # torch's DDP may hang if it is freed after its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
