"""A callback for Transformers' Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from . import CommHook

FILE_NAME = "gradcomp_state.pt"
_logger = logging.getLogger(__name__)


class CommHookCallback(CommHook, TrainerCallback):
    """Registers a hook on the model that a Trainer wraps in DDP, and checkpoints the hook's state.

    trainer: the Trainer that gets this callback; only the Trainer knows the wrapped model.
    state, hook: as for register_comm_hook; one state per model.
    resume_from: the checkpoint's folder, for a run that resumes from outside the Trainer's output_dir.

    Every checkpoint gets a file gradcomp_state.pt: the state, once for all ranks, with the mean of the ranks'
    errors. A run that resumes from a checkpoint without the file starts with a new state, and logs a warning.

    Raises CommHook's errors, when training begins.

    Example::

        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.add_callback(CommHookCallback(trainer, QuantizationState(bits=4), quantization_hook))
    """

    def __init__(
        self, trainer: Trainer, state: Any, hook: Callable[..., Any], *, resume_from: str | Path | None = None
    ):
        self._trainer, self._resume_from = trainer, resume_from
        super().__init__(state, hook)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        path = Path(self._resume_from or self._folder(args, state), FILE_NAME)
        if state.global_step > 0 and path.exists():
            self.load_state_dict(torch.load(path, map_location="cpu"))
        elif state.global_step > 0 and self.has_memory:
            _logger.warning(
                "the run resumes, but there is no %s: the hook's state starts at zero. If it resumes from "
                "another folder, give CommHookCallback that as resume_from.",
                path,
            )
        self.register(self._trainer.model_wrapped)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.follow(self._trainer.accelerator.scaler)

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        state_dict = self.state_dict()  # on every rank: a collective
        if state_dict and args.should_save:
            torch.save(state_dict, self._folder(args, state) / FILE_NAME)

    @staticmethod
    def _folder(args: TrainingArguments, state: TrainerState) -> Path:
        return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
