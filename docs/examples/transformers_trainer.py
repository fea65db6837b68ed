"""Train a small GPT-2 with Transformers' Trainer, gradients in 4 bits; a second call resumes.

torchrun --nproc-per-node 2 docs/examples/transformers_trainer.py folder
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from gradcomp.frameworks.transformers import CommHookCallback
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


def main(folder):
    Path(folder).mkdir(exist_ok=True)
    last = get_last_checkpoint(folder)
    tokens = (torch.arange(16) + torch.arange(512)[:, None]) % 64  # counting: easy to learn
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=80 if last else 40,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_steps=40,
        logging_steps=20,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        seed=0,
    )
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model, arguments, train_dataset=data)
    state = QuantizationState(bits=4)
    trainer.add_callback(CommHookCallback(trainer, state, quantization_hook))
    trainer.train(resume_from_checkpoint=last)

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-2:]  # of this call
    if trainer.is_world_process_zero():
        rate = state.compression_stats()[0]
        print(f"step {state.iter}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:.1f} times fewer bytes")


if __name__ == "__main__":
    main(sys.argv[1])
    gc.collect()  # the trainer's remains hold the process group, whose threads must end before Python does
    dist.barrier()
    dist.destroy_process_group()
