"""Code that runs before and after documented blocks, and the blocks that don't run, with the reason.

A page's blocks run in order, in one namespace, on each of two ranks (gloo). Before a block runs its code in
BEFORE, or FRESH if BEFORE has none. After a block runs its code in AFTER. Then every model that averages
gradients is trained.
"""

from tests.frameworks.recipes import IN_RECIPES

FRESH = """
model = module = new_model()
ddp_model = DistributedDataParallel(new_model())
"""

HOOKED = """
ddp_model = DistributedDataParallel(new_model())
state = powerSGD.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
ddp_model.register_comm_hook(state, powerSGD.powerSGD_hook)
train(ddp_model)
"""

WITH_HOOKS = (
    FRESH
    + """
from gradcomp.frameworks import CommHook
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
"""
)

GRADIENTS = "\nmodel = new_model()\nloss = model(torch.randn(8, 64)).square().mean()\n"

BEFORE = {
    ("docs/auto.md", 1): """
state, ddp_model = AutoState(), DistributedDataParallel(new_model())
ddp_model.register_comm_hook(state, auto_hook)
train(ddp_model)
""",
    ("docs/reducer.md", 1): GRADIENTS,
    ("docs/fsdp.md", 1): FRESH + "num_nodes = world_size",
    ("docs/fsdp.md", 2): """
import torch.distributed.checkpoint as dcp
from gradcomp.compress import load_from_dcp, per_rank_state_dict
state = QuantizationState(replicate_group, bits=4)
folder = "fsdp-checkpoint"
""",
    ("docs/frameworks/torchrun.md", 0): WITH_HOOKS,
    ("docs/frameworks/torch_compile.md", 0): WITH_HOOKS,
    ("docs/frameworks/zero_redundancy.md", 0): WITH_HOOKS
    + "from torch.distributed.optim import ZeroRedundancyOptimizer",
    ("docs/frameworks/local_steps.md", 0): WITH_HOOKS
    + """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = [(torch.randn(8, 64), torch.zeros(8, 64)) for _ in range(40)]
""",
    ("docs/frameworks/local_steps.md", 1): FRESH
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
num_sites = world_size
""",
    ("docs/frameworks/local_steps.md", 2): """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from gradcomp.compress import load_from_dcp, per_rank_state_dict
folder = "local-steps-checkpoint"
""",
    ("docs/hooks.md", 2): FRESH
    + "from gradcomp.hooks.quantization_hooks import quantization_perchannel_hook",
    ("docs/what_compression_cant_know.md", 0): HOOKED
    + """
ddp_discriminator, fake, inputs = ddp_model, torch.randn(8, 64), torch.randn(8, 64)
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
loss_of_generator = torch.mean
""",
    ("docs/weighted_averages.md", 0): HOOKED
    + """
micro_batches = [(torch.randn(n, 64), torch.randint(64, (n,))) for n in (5 + rank, 3)]
""",
    ("docs/weighted_averages.md", 1): HOOKED
    + """
batches = [(torch.randn(n, 64), torch.randint(64, (n,)), 2 * n) for n in (4, 40, 7)]
""",
    ("docs/recording.md", 1): """
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
model = DistributedDataParallel(new_model())
""",
    ("docs/recording.md", 2): """
from types import SimpleNamespace
step, run = 99, SimpleNamespace(log=lambda values, step: None)
""",
    ("docs/new_compressor.md", 1): "model = DistributedDataParallel(new_model())",
    ("docs/checkpoints.md", 1): "",
    ("docs/checkpoints.md", 3): FRESH + "old_world_size = world_size",
    ("docs/checkpoints.md", 4): "",
    ("docs/checkpoints.md", 6): "",
    ("docs/checkpoints.md", 9): "",
}

AFTER = {
    ("docs/frameworks/torchrun.md", 0): "train(model); assert state.iter == 4",
    ("docs/frameworks/torch_compile.md", 0): "train(model)",
    ("docs/frameworks/zero_redundancy.md", 0): "train(model, optimizer=optimizer)",
    ("docs/frameworks/local_steps.md", 0): "check_equal(model); assert state.iter == 3",
    ("docs/hooks.md", 2): "ddp_model.register_comm_hook(None, in_blocks_of_128)",
    ("docs/checkpoints.md", 10): """
assert state.state.keys() <= dict(ddp_model.module.named_parameters()).keys()
assert any(kept["error"].any() for kept in state.state.values())
""",
}

# Replacements in a page's code, for two ranks on a machine without GPUs.
INSTEAD = {
    ("docs/fsdp.md", 1): {'"cuda"': '"cpu"', "(num_nodes, 8)": "(num_nodes, 1)"},
    ("docs/frameworks/local_steps.md", 1): {'"cuda"': '"cpu"', "(num_sites, 8)": "(num_sites, 1)"},
    # The recipe's example runs on Inductor, which takes a minute: see tests/frameworks/test_recipes.py.
    ("docs/frameworks/torch_compile.md", 0): {"Parallel(model))": 'Parallel(model), backend="aot_eager")'},
    ("docs/frameworks/lightning.md", 0): {
        'strategy="ddp"': 'strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, logger=False, '
        "enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False"
    },
}

# Blocks that simulate ranks themselves, or need none: they run in a process without a group.
WITHOUT_GROUP = {("README.md", 1), *(("docs/testing.md", number) for number in range(4)), ("docs/plan.md", 0)}

# Python that other tests run.
RUN_ELSEWHERE = {
    ("docs/new_compressor.md", 2): "tests/compress/test_new_compressor.py",
    # One script, block after block.
    **{("docs/quick_start.md", number): "tests/docs/test_quick_start.py" for number in range(4)},
    # tests/frameworks/test_pages.py finds every line of these pages in what runs.
    **{
        (f"docs/frameworks/{page}.md", number): "tests/frameworks/recipes.py"
        for page in IN_RECIPES
        for number in range(2 if page in ("accelerate", "fabric") else 1)
    },
}

PRINTED = "what the command above it prints"
PICTURE = "a picture in characters"

# Blocks that are neither Python nor commands: page, start of the first line, reason.
NOT_RUN = [
    ("docs/accuracy.md", "gpt: 136,960 parameters", PRINTED),
    ("docs/architecture.md", "kernels/       Triton kernels", PICTURE),
    ("docs/architecture.md", "__init__ ──▶ parallel", PICTURE),
    ("docs/auto.md", "gradcomp: auto_hook uses", PRINTED),
    ("docs/fsdp.md", "disable_fsdp_gradient_division(model)", "a patch of torchtitan, run by hand"),
    ("docs/quick_start.md", "torchrun --nproc-per-node 2 docs", "run by tests/docs/test_quick_start.py"),
    ("docs/recording.md", "gradcomp: PowerSGD compresses", PRINTED),
    ("docs/others_hooks.md", "", PRINTED),  # see test_others_hooks.py
    ("docs/plan.md", "model    335,141,888", PRINTED),
    ("docs/testing.md", "top_k_hook", PRINTED),
    ("docs/testing.md", "unbiased fails for", PRINTED),
    ("docs/testing.md", "powerSGD_hook: world size 2", PRINTED),
]
