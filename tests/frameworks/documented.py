"""Run the Python blocks of a page of docs/frameworks on this rank, with the code that they need around them.

torchrun --nproc-per-node 2 tests/frameworks/documented.py folder page
"""

import gc
import sys

import torch
import torch.distributed as dist
import torch.distributed.optim  # before a process group exists, which some of torch's functions would keep
from torch import nn

from tests.docs.code_blocks import ROOT, blocks_in
from tests.docs.running import execute, execute_block


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def train(model, optimizer=None, backward=torch.Tensor.backward, num_steps=4):
    """Train on different data on every rank, and check that all ranks have equal gradients."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x), x.roll(1, dims=1)))
        optimizer.step()
    same_on_all_ranks([parameter.grad for parameter in model.parameters()])


def same_on_all_ranks(tensors):
    mine = torch.cat([tensor.flatten() for tensor in tensors])
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    assert mine.any()
    assert all(torch.equal(mine, each) for each in all_of_them)


# (page, block's number) -> the code that runs before the block; AFTER has the code that runs after it.
BEFORE = {
    ("accelerate", 0): """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator(cpu=True)
model = new_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8)
""",
    ("accelerate", 1): """
import logging
import gradcomp
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("gradcomp").addHandler(handler)
logging.getLogger("gradcomp").setLevel(logging.INFO)
from accelerate import DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType
model = new_model()
""",
    ("fabric", 0): """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = new_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
""",
    ("fabric", 1): "path = f'{folder}/run.ckpt'",
    ("lightning", 0): """
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = new_model()

    def training_step(self, batch, _):
        return (self.layers(batch[0]) - batch[0].roll(1, dims=1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
""",
    ("transformers", 0): """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
tokens = (torch.arange(16) + torch.arange(64)[:, None]) % 64
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    output_dir=folder, max_steps=3, per_device_train_batch_size=8, report_to="none", disable_tqdm=True,
    use_cpu=True, ddp_backend="gloo", ddp_find_unused_parameters=False,
)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
))
""",
}
AFTER = {
    ("accelerate", 0): "train(model, optimizer, accelerator.backward); accelerator.save_state(folder)",
    ("accelerate", 1): """
train(model, None, accelerator.backward, num_steps=12)
# Torch's hook says nothing.
assert dist.get_rank() > 0 or any("compresses from step 10 on" in each for each in said)
""",
    ("fabric", 0): "train(model, optimizer, fabric.backward); assert comm_hook.state.iter == 4",
    ("fabric", 1): "assert torch.load(path)['compression']['iter'] == 4",
    ("lightning", 0): """
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8))
assert state.iter == 4
same_on_all_ranks(trainer.model.parameters())
""",
    ("transformers", 0): """
same_on_all_ranks(model.parameters())
assert [each for each in trainer.callback_handler.callbacks if isinstance(each, CommHookCallback)]
""",
}


def run(page, folder):
    names = {name: globals()[name] for name in ("torch", "dist", "nn", "new_model", "train")}
    names |= {"same_on_all_ranks": same_on_all_ranks, "folder": folder}
    path = f"docs/frameworks/{page}.md"
    blocks = [each for each in blocks_in((ROOT / path).read_text(), path) if each.language == "python"]
    assert blocks
    for block in blocks:
        execute(BEFORE[page, block.number], f"before {path}:{block.line}", names)
        execute_block(block, names)
        execute(AFTER[page, block.number], f"after {path}:{block.line}", names)
    names.clear()  # a logging handler still refers to it


if __name__ == "__main__":
    run(sys.argv[2], sys.argv[1])
    gc.collect()  # models hold the process group, whose threads must end before Python does
    dist.barrier()
    dist.destroy_process_group()
    print("all blocks have run")
