"""Time a training step without a hook, and with a hook that sends nothing.

torchrun --nproc-per-node 2 time_your_step.py
"""

import atexit
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import debugging_hooks

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
atexit.register(dist.destroy_process_group)
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)


def make_model():  # yours
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    )


def train_step(model, optimizer):  # yours
    x = torch.randn(32, 64, device=device)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()


def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def ms_per_step(hook=None, steps=20):
    model = make_model()
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):  # DDP arranges its buckets
        train_step(model, optimizer)
    start = now()
    for _ in range(steps):
        train_step(model, optimizer)
    return (now() - start) / steps * 1e3


without_hook, without_network = ms_per_step(), ms_per_step(debugging_hooks.noop_hook)
if dist.get_rank() == 0:
    print(f"{without_hook:.1f} ms per step, {without_network:.1f} ms if communication were free")
