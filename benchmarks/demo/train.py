"""Train a small GPT on real text. One line registers the hook; the rest is as in any program with DDP."""

import argparse
import gc
import json
import os
import sysconfig
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.demo.corpus import VOCABULARY, Windows
from benchmarks.demo.measure import Recorder, check_replicas
from benchmarks.demo.wire import Wire
from gradcomp.command_line import positive_int
from gradcomp.hooks.auto_hook import AutoState, auto_hook
from gradcomp.hooks.named_hooks import NamedHook

AUTO = "auto"  # auto_hook's name; others have theirs in gradcomp/hooks/named_hooks.py
# The first steps are plain all-reduces: the weights change fastest then, and DDP rebuilds its buckets. The
# rule for real runs is a tenth.
PLAIN_STEPS = 4
MIN_STEPS = 10  # fewer leave no step to time after the plain ones
BUCKET_CAP_MB = 1  # so that there are several buckets
LEARNING_RATE = 1e-3
TIMEOUT = timedelta(seconds=60)  # the time after which a rank stops waiting for another


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the training, which are the same for every hook."""
    group = parser.add_argument_group("training")
    for name, default, text in (
        ("steps", 400, f"optimizer steps per hook, at least {MIN_STEPS}"),
        ("width", 128, "width of the GPT, a multiple of --heads"),
        ("layers", 4, "its transformer blocks"),
        ("heads", 4, "its attention heads"),
        ("batch", 4, "sequences per rank and step"),
        ("sequence", 64, "bytes per sequence"),
        ("ranks", 2, "processes"),
    ):
        help_text = f"{text} (default: %(default)s)"
        group.add_argument(f"--{name}", type=positive_int, default=default, metavar="N", help=help_text)
    text = "of weights and data (default: %(default)s)"
    group.add_argument("--seed", type=int, default=0, metavar="N", help=text)
    group.add_argument("--out", type=Path, metavar="DIR", help="folder (default: %(default)s)")


def parse_training_options(
    parser: argparse.ArgumentParser, arguments: list[str] | None
) -> argparse.Namespace:
    """Parse the arguments; end the program with a clear message if the options do not fit together."""
    options = parser.parse_args(arguments)
    if options.steps < MIN_STEPS:
        parser.error(f"--steps must be at least {MIN_STEPS} to time any of them: got {options.steps}")
    if options.width % options.heads:
        parser.error(f"--width must be a multiple of --heads: got {options.width} and {options.heads}")
    if options.seed < 0:
        parser.error(f"--seed must not be negative: got {options.seed}")
    return options


class Block(nn.Module):
    """A transformer block: attention, then a perceptron of two layers, each normalized before."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor [batch, sequence, width] to one of equal shape."""
        qkv = self.attention(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    """A GPT that maps bytes to logits for each next byte."""

    def __init__(self, width: int, layers: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for weight in (self.token.weight, self.position.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Compute the cross-entropy of predicting each next byte of the windows, in nats per byte."""
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def train_steps(
    label: str,
    recorder: Recorder,
    optimizer: torch.optim.Optimizer,
    next_loss: Callable[[], Tensor],
    validate: Callable[[], Tensor],
    after_step: Callable[[], None] = lambda: None,
    warmup_steps: int = 10,
) -> None:
    """Train all of the recorder's steps. The learning rate rises for ``warmup_steps``, and falls to 0.

    next_loss: computes the loss of the next batch. validate: computes this rank's validation loss.
    """
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup_steps, 1) * (1 - step / recorder.steps)
    )
    with torch.no_grad():
        recorder.add_validation(validate())
    for _ in range(recorder.steps):
        with recorder.step():
            loss = next_loss()
            optimizer.zero_grad()
            loss.backward()  # the hook runs in here, once per bucket
            optimizer.step()
        schedule.step()
        after_step()
        recorder.losses.append(loss.detach())
        if recorder.is_time_to_validate():
            with torch.no_grad():
                recorder.add_validation(validate())
        recorder.show(label)


def register(hook: str, model: DistributedDataParallel) -> AutoState | None:
    """Register a hook by its name; return the state of auto_hook."""
    if hook != AUTO:
        NamedHook.named(hook).register(model, PLAIN_STEPS)
        return None
    state = AutoState(start_iter=PLAIN_STEPS, rounds=1)  # a short trial, for a short run
    model.register_comm_hook(state, auto_hook)
    return state


def train(hook: str, options: argparse.Namespace, device: torch.device, wire: Wire) -> dict[str, Any]:
    """Train a GPT with a hook on this rank's part of the data, and return the record of the run."""
    folder = sysconfig.get_paths()["stdlib"]
    data = Windows(folder, options.sequence, options.seed, dist.get_rank(), dist.get_world_size())
    validation = data.validation.to(device)
    torch.manual_seed(options.seed)
    net = GPT(options.width, options.layers, options.heads, options.sequence).to(device)
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_CAP_MB)
    state = register(hook, model)
    recorder = Recorder(options.steps, device, wire, num_validations=20)
    train_steps(
        hook,
        recorder,
        torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE),
        lambda: loss_of(model, data.draw(options.batch).to(device)),
        lambda: loss_of(net, validation),
    )
    check_replicas(list(net.parameters()))
    return {"hook": hook, "choice": state and state.choice, **recorder.result()}


def join_group(rank: int, ranks: int, store: str) -> torch.device:
    """Join the ranks through a file, of this URL, and return this rank's device.

    The backend is NCCL where every rank has a GPU of its own, and gloo where ranks share GPUs and on the CPU.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        device = torch.device("cuda", rank % num_gpus)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    backend = "nccl" if num_gpus >= ranks else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    return device


def work(rank: int, store: str, options: argparse.Namespace) -> None:
    """Train with each of options.hooks as one of options.ranks ranks here, which join through a file.

    Rank 0 writes the records to options.out.
    """
    device = join_group(rank, options.ranks, store)
    with Wire(options.link) as wire:
        for hook in options.hooks:
            if rank == 0:
                print(f"\n== {hook}", flush=True)
            record = train(hook, options, device, wire)
            if rank == 0:
                facts = {"ranks": options.ranks, "device": device.type}
                facts |= {"torch": torch.__version__, "backend": dist.get_backend(), "options": vars(options)}
                (options.out / f"{hook}.json").write_text(json.dumps({**facts, **record}, default=str))
            # DDP models are freed by the garbage collector only. Until then they keep the process group and
            # its threads alive, which abort if they free a tensor while Python shuts down.
            gc.collect()
    dist.destroy_process_group()
