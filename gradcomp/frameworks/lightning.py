"""A callback for Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import lightning.pytorch as pl
except ModuleNotFoundError:  # the older package
    import pytorch_lightning as pl  # type: ignore[no-redef]

from . import CommHook


class CommHookCallback(CommHook, pl.Callback):
    """Registers a hook on the model of Lightning's DDP strategies, and checkpoints the hook's state.

    state, hook: as for register_comm_hook; one state per model.

    Lightning's own ``ddp_comm_hook`` registers on CUDA only, and saves nothing. Here checkpoints hold the
    state once for all ranks, with the mean of the ranks' errors.

    Raises CommHook's errors, when fitting starts.

    Example::

        state = PowerSGDState(None, matrix_approximation_rank=4)
        trainer = Trainer(strategy="ddp", callbacks=[CommHookCallback(state, powerSGD_hook)])
    """

    def __init__(self, state: Any, hook: Callable[..., Any]):
        super().__init__(state, hook)
        self._scale_may_differ = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model = trainer.strategy.model
        self.register(pl_module if model is None else model)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # Not in on_fit_start: the scaler's checkpoint is loaded later.
        self._follow(trainer)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._scale_may_differ = True

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._scale_may_differ:  # a batch may have several optimizer steps: each updates the scaler
            self._follow(trainer)

    def _follow(self, trainer: pl.Trainer) -> None:
        self._scale_may_differ = False
        self.follow(getattr(trainer.precision_plugin, "scaler", None))
