"""The command `torchrun … -m gradcomp bench`: train a model with auto_hook, print its table and choice."""

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gradcomp import command_line
from gradcomp.comm.announcement import shown_bytes
from gradcomp.comm.nodes import AUTO
from gradcomp.command_line import OneLineParser, in_words, positive, positive_int
from gradcomp.compress.trial import WARM_UP_STEPS
from gradcomp.device import has_streams
from gradcomp.hooks.auto_hook import CANDIDATES, AutoState, auto_hook
from gradcomp.hooks.debugging_hooks import noop_hook
from gradcomp.hooks.default_hooks import allreduce_hook

HOW_TO_START = (
    "start it with torchrun, on one machine (torchrun --nproc-per-node 2 -m gradcomp bench) or on several "
    "(torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 …)"
)


def bench_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="torchrun … -m gradcomp bench",
        description="Train a model until auto_hook has chosen a hook. Print how much shorter a step without "
        "communication is, the trial's table, and the choice.",
        epilog=f"{HOW_TO_START[0].upper()}{HOW_TO_START[1:]}.",
    )
    text = (
        "gpt (3 million parameters), gpt-medium (303 million), or module:callable, which returns (module, "
        "loss), where loss(model) computes the loss of a step. Default: %(default)s."
    )
    parser.add_argument("--model", default="gpt", help=text)
    text = "auto_hook's candidates besides none, mildest first, with commas. Default: %(default)s."
    hooks, default = command_line.hooks_named, ",".join(CANDIDATES[1:])
    parser.add_argument("--hook", type=hooks, default=default, metavar="NAMES", help=text)
    text = "The rounds of the trial. Default: 3. More find smaller gains."
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help=text)
    text = "DDP's option of this name. Default: 25."
    parser.add_argument("--bucket-cap-mb", type=positive, default=25.0, metavar="MB", help=text)
    text = "The ranks of a node, which share its network cards. Default: torchrun's."
    parser.add_argument("--ranks-per-node", type=positive_int, metavar="N", help=text)
    text = "Compute on the CPU and communicate with gloo, though there are GPUs."
    parser.add_argument("--cpu", action="store_true", help=text)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = bench_parser()
    options = parser.parse_args(arguments)
    per_node, names = options.ranks_per_node, [hook.name for hook in options.hook]
    trial = {"start_iter": 2, "rounds": options.rounds, "retrial_every": None}
    try:
        state = AutoState(None, names, **trial, ranks_per_node=per_node or AUTO)
    except ValueError as error:
        parser.error(str(error))
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks < 2:
        parser.error(f"one rank has nobody to communicate with; {HOW_TO_START}")
    if num_ranks % (per_node or 1):
        parser.error(f"{num_ranks} ranks don't fill nodes of {per_node} (--ranks-per-node)")
    _run_rank(parser, options, state)


def _run_rank(parser: OneLineParser, options: Any, state: AutoState) -> None:
    """Measure as one of the ranks, of which rank 0 prints."""
    logging.getLogger("gradcomp").setLevel(logging.WARNING)  # auto_hook's own line has the table, too
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = torch.device("cuda", local_rank) if on_gpus and not options.cpu else torch.device("cpu")
    if has_streams(device):
        torch.cuda.set_device(device)
    backend = "nccl" if has_streams(device) else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    module, loss = _model(parser, options.model, device)
    if rank == 0:
        numel = sum(each.numel() for each in module.parameters() if each.requires_grad)
        print(f"{options.model}: {numel:,} parameters, {world_size} ranks, {backend}", flush=True)
    noop_ms, none_ms = measure(module, loss, state, device, options.bucket_cap_mb)
    if rank == 0:
        print("\n".join(report(state, noop_ms, none_ms)))
    dist.destroy_process_group()


def report(state: AutoState, noop_ms: float, none_ms: float) -> list[str]:
    """Return lines of text: what a step without communication would gain, the trial's table, the choice."""
    rows = [["hook", "step", "gain", "interval", "wait", "sent", "loss, nats", "why not"]]
    rows.append(["noop", _ms(noop_ms), _ms(none_ms - noop_ms), "", "", "0 B", "", "it averages nothing"])
    for row in state.table:
        low, high, sent, nats = (row[key] for key in ("gain_low_ms", "gain_high_ms", "sent_bytes", "nats"))
        interval = "" if low is None else f"{low:.3g} to {high:.3g}"
        cells = [row["candidate"], _ms(row["ms"]), _ms(row["gain_ms"]), interval, _ms(row["wait_ms"])]
        cells += ["" if sent is None else shown_bytes(sent), "" if nats is None else f"{nats:+.3f}"]
        rows.append([*cells, row["why"]])
    step = {name: ms for name, ms, *_ in rows[2:]}
    (first, *_), chosen = step, str(state.choice)
    advice = f"Use {chosen}: a step takes {step[chosen]} instead of {step[first]}."
    if chosen == first:
        surely = f"no hook surely gains more than {state.tolerance:.0%} of a step, within the wait."
        advice = f"Steps vary too much to tell: {surely} More --rounds may tell."
        if state.is_sure:
            advice = f"Don't compress: {surely}"
    return [
        f"headroom: without communication (noop) a step is {max(0.0, 1 - noop_ms / none_ms):.0%} shorter",
        "",
        *command_line.aligned(rows),
        "",
        "loss: of the small GPT of docs/accuracy.md, above no compression. docs/auto.md has the rule.",
        advice,
    ]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} ms"


Loss = Callable[[nn.Module], Tensor]


def measure(
    module: nn.Module, loss: Loss, state: AutoState, device: torch.device, bucket_cap_mb: float
) -> list[float]:
    """Train until the state has chosen. No weight changes, so all steps are alike. A collective.

    Returns the slowest rank's median ms of a step with noop and without compression, which take turns.
    """
    hooks = [partial(noop_hook, None), partial(allreduce_hook, None)]
    in_use: partial[Any] = hooks[0]
    times_ms: dict[partial[Any], list[float]] = {hook: [] for hook in hooks}
    model = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb)
    model.register_comm_hook(None, lambda _, bucket: in_use(bucket))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)

    def train(num_steps: int) -> float:
        """Train; return the time at the end."""
        for _ in range(num_steps):
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        if has_streams(device):
            torch.cuda.synchronize(device)
        return time.perf_counter()

    num_timed = state.steps_per_turn - WARM_UP_STEPS
    for in_use in hooks * state.rounds:
        start = train(WARM_UP_STEPS)
        times_ms[in_use].append((train(num_timed) - start) / num_timed * 1e3)
    medians = list(map(statistics.median, times_ms.values()))
    slowest = torch.tensor(medians, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    in_use = partial(auto_hook, state)
    while state.choice is None:
        train(1)
    return slowest.tolist()


def gpt(width: int = 256, num_blocks: int = 4) -> tuple[nn.Module, Loss]:
    """Return a GPT without positions, and its loss."""
    options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    blocks = (nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(num_blocks))
    head = nn.Linear(width, 256, bias=False)
    module = nn.Sequential(nn.Embedding(256, width), *blocks, nn.LayerNorm(width), head)
    tokens = torch.randint(256, (4, 65), dtype=torch.int64, device=head.weight.device)
    return module, lambda model: cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


MODELS: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {"gpt": gpt, "gpt-medium": partial(gpt, 1024, 24)}


def _model(parser: OneLineParser, name: str, device: torch.device) -> tuple[nn.Module, Loss]:
    """Return a model on a device, and the function that computes its loss.

    If the model can't be made or trained, this rank ends with the reason, and torchrun ends the others.
    """
    try:
        if name not in MODELS and ":" not in name:
            raise ValueError(f"it is neither one of {', '.join(MODELS)} nor module:callable")
        with device:
            module, loss = (MODELS.get(name) or command_line.find_callable(name, "model"))()
        loss(module.to(device)).backward()
        module.zero_grad()
    except (Exception, SystemExit) as error:
        needed = "a callable must return (module, loss), where loss(model) computes the loss of a step"
        parser.error(f"rank {dist.get_rank()}: model {name!r} can't be trained: {in_words(error)}; {needed}")
    return module, loss
