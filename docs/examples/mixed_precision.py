"""Train in fp16 with a GradScaler: the errors that compression keeps follow the scale when it changes.

torchrun --nproc-per-node 2 docs/examples/mixed_precision.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
    state.number_parameters(model.named_parameters())
    model.register_comm_hook(state, quantization_hook)

    losses, scales = [], []
    for step in range(60):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        with torch.autocast(device, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        state.rescale_errors(scaler.get_scale() / scale)
        losses.append(loss.item())
        scales.append(scale)

    if dist.get_rank() == 0:
        rate = state.compression_stats()[0]
        print(f"step {state.iter}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:.1f} times fewer bytes")
        print(f"scales {sorted(set(scales))}")
    dist.barrier()
    del model  # torch's DDP may hang if it is freed after its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
