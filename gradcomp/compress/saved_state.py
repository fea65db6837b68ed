"""What a hook's state keeps of parameters, and how it is saved."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..comm.announcement import say, shown_bytes
from ..comm.bucket import as_real
from ..comm.consistency import first_of
from ..comm.process_group import joined_group
from ..rules import SCALE
from . import checkpoint
from .agreement import Place
from .checkpoint import PROGRESS, owner_of
from .parameter_states import Entries, ParameterStates
from .settings import ConfiguredState, Settings, as_dict, logger_of


class SavedState(ConfiguredState):
    """What every state keeps of parameters, its statistics, and its checkpoints, pickles and copies."""

    keep_undo: bool = False
    _place: Place
    _steps: Any  # Steps
    _sizes: Any  # GradientSizes

    def _reset(self, process_group: Any, settings: Settings) -> None:
        """Set all attributes to their values before the first step."""
        vars(self).update(process_group=process_group, ranks_per_node=self._default_ranks_per_node)
        self.settings = settings
        self._states = ParameterStates()
        self._scale: float | None = None  # of gradients and errors
        self.recorder: Any = None
        self.announced: set[str] = set()
        self.next_stats_report = 0
        self.total_numel_before_compression = self.total_numel_after_compression = 0
        self._errors_of: dict[str, Any] | None = None  # the rank that saved the loaded errors, until a step

    # --- parameters ---

    @property
    def has_model(self) -> bool:
        """True if buckets have brought a model's parameters, or number_parameters has named them."""
        return bool(self._states.keys.known() or self._states._buckets)

    def number_parameters(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Identify a model's parameters by their names, in this run and in checkpoints.

        named_parameters: model.named_parameters().

        Call it before the first step if you use torch's DDP, which tells a hook no names. gradcomp's wrapper
        and Reducer, CommHook, compress_replicas and compress_reduce_scatter call it for you.

        Without names, parameters are known by the first step's buckets. If the first step of a resumed run
        has other buckets (another bucket_cap_mb, say), saved errors can't be used: a warning is logged.

        Raises TypeError for anything but pairs of a name and a tensor; ValueError if a checkpoint has these
        names, but buckets have brought the parameters already.

        Example::

            state.number_parameters(model.named_parameters())
            ddp_model.register_comm_hook(state, hook)
        """
        self._states.name(named_parameters)

    @torch.inference_mode(False)
    def undo_step(self, step: int | None = None) -> None:
        """Take the last averages back, because the optimizer doesn't get these gradients.

        step: state.iter as it was before the backward, or before several ones. All steps since then are taken
            back; none after an error that came before the first average. None for backwards that have ended:
            takes back all of them between which nobody has changed gradients or parameters, such as the
            backwards of several models before their optimizers step.

        It needs keep_undo = True, and every rank must call it after the same backward: the next step compares
        the ranks. Errors, directions and the number of steps are again what they were. Statistics still count
        the bytes, which have been sent.

        Raises RuntimeError if there is nothing to take back, or not all of it can be.

        Example::

            state.keep_undo = True
            for batch in batches:
                loss_of(ddp_model, batch).backward()
                if is_too_large(ddp_model):  # the same on every rank
                    state.undo_step()
                else:
                    optimizer.step()
                optimizer.zero_grad()
        """
        steps, self.compared_in = self._steps, None
        first, steps.is_undoable = steps.first if steps.is_undoable else None, False
        end = steps.num + (steps.num_buckets > 0)
        has_begun = first is not None and (step != end or steps.is_joined)
        if self.keep_undo and step is not None and not has_begun:
            return
        start = first if step is None else step
        if start is None or not self._states.lost_undo < start < end:
            since = "" if start is None else f" since step {start}, of {end}"
            raise RuntimeError(
                f"undo_step has no backward to take back{since}, and keep_undo is {self.keep_undo}. Likely "
                "cause: keep_undo was not set before the backward, undo_step was called twice, parameters "
                "were averaged again since, an FSDP2 module that ran twice reduced its parameters in parts, "
                "the step had begun in an earlier backward (nobody zeroed the gradients between them), or a "
                "checkpoint was loaded or parameters were named since"
            )
        self._states.undo(start)
        self.iter = start
        if self.recorder is not None:
            self.recorder.forget_step(start)
        if self._sizes is not None and self._sizes.last_step >= start:
            self._sizes.num_steps -= 1

    def take_back(self, parameter: torch.Tensor, average: torch.Tensor) -> None:
        """Add a parameter's unused average back to the error.

        average: the average, flat, as in the bucket.

        A Reducer calls this if it learns after a step that no rank has used the parameter. The parameter's
        gradient then stays unchanged, and the errors that the average contains would be lost.
        """
        values = as_real(average).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        key = self._states.keys.get(parameter)
        for bucket in self._states._buckets:
            if key is not None and key in bucket.keys:
                bucket.add_to_error(key, values)

    @property
    def gradient_scale(self) -> float | None:
        """What losses, and so gradients and errors, are multiplied by. None until it is assigned or loaded.

        Assign scaler.get_scale() at the beginning of every step, from the first one on, on every rank; after
        a skipped step call undo_step first. CommHook.follow does both. Errors that are loaded without a scale
        are taken to have the first one that is assigned.

        Raises ValueError for a scale that is not finite and positive.
        """
        return self._scale

    @gradient_scale.setter
    def gradient_scale(self, scale: float) -> None:
        scale, before = SCALE("gradient_scale", scale), self._scale
        if before is not None:
            self.rescale_errors(scale / before)
        self._scale = scale

    @torch.inference_mode(False)
    def rescale_errors(self, factor: float) -> None:
        """Multiply this rank's errors by factor: the gradients' new scale divided by their old one.

        gradient_scale does this for a GradScaler. Raises ValueError unless the factor is finite and positive.
        """
        if (factor := SCALE("the factor of rescale_errors, new scale / old scale,", factor)) != 1:
            self._states.scale_errors(factor)
        if self._sizes is not None:
            self._sizes.scale *= factor
        if self._scale is not None:
            self._scale *= factor

    def errors_of_buckets(self) -> dict[int, torch.Tensor]:
        """Return copies of this rank's errors by the index of their bucket, [numel]."""
        errors = {}
        for bucket in self._states._buckets:
            entries = bucket.entries().values()
            if parts := [entry["error"].flatten() for entry in entries if "error" in entry]:
                errors[bucket.index] = torch.cat(parts)
        return errors

    @property
    def state(self) -> Entries:
        """What is kept of each parameter, copied: {name: {"error": [as the parameter], ...}}.

        The keys are the parameters' names, see number_parameters; without names, the place where a bucket
        first brought them. What belongs to a whole bucket has a tuple of all its parameters' keys as its key.
        Errors are in the gradients' unit; the error of a complex parameter has a last dimension of 2.
        """
        return self._states.entries()

    # --- statistics ---

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (compression rate, elements before compression, elements after), summed over all steps."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0), before, after

    def _report_stats(self) -> None:
        """Log the statistics, and note when they are due again."""
        rate, before, after = self.compression_stats()
        logger_of(self).info(
            "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
            *(self.iter, before, after, rate),
        )
        self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    # --- announcements ---

    def _announce_phase(self, name: str) -> None:
        """Announce the first compressed step of the phase of this name, which ends."""
        self.announced.add(name)
        place, gradient_bytes, sent_bytes = self._place, self._steps.gradient_bytes, self._steps.sent_bytes
        per_node = place.ranks_per_node
        nodes = f"node, between {place.size // per_node} nodes of {per_node} ranks"
        per = nodes if per_node > 1 else "rank"
        if sent_bytes < gradient_bytes:
            rate = f"{gradient_bytes / sent_bytes:.1f} times fewer bytes" if sent_bytes else "no bytes"
        else:
            rate = f"{sent_bytes / gradient_bytes:.2f} times as many bytes"
        saved = f"{rate}, {shown_bytes(sent_bytes)} of {shown_bytes(gradient_bytes)}"
        text = f"{name} compresses from step {self._steps.num} on: {saved} per step and {per}"
        if place.has_delay:
            text += f"; a message and its answer take {place.round_trip_s * 1e3:.0f} ms"
        if place.size == 1:
            text += "; one rank sends nothing: its results show what compression loses, not what it saves"
        say(text, joined_group(self.process_group))
        if sent_bytes >= gradient_bytes:
            logger_of(self).warning("%s saves no bytes%s.", name, self._why_nothing_is_saved())

    def _why_nothing_is_saved(self) -> str:
        """Return words that go on after "saves no bytes", with the likely cause."""
        return ""

    def _warn_of_keys(self, text: str, keys: Sequence[str]) -> None:
        """Log a text with the first of these keys in the place of %s, if there are any."""
        if keys:
            logger_of(self).warning("%s: %s.", self.algorithm, text % first_of(keys))

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return everything except the process group, in plain types and copied tensors.

        "version": the format's version.
        "algorithm": the compressor's name.
        "options": the compressor's options by name.
        Settings and progress: one entry each, by name.
        "errors_of": the rank that the errors belong to, {"rank", "world_size"}.
        "parameters": what is kept of each parameter, as in `state`.
        "num_parameters": the number of entries in "parameters".
        "gradient_scale": the errors' scale; None if it is unknown.
        """
        entries = self._states.entries()
        for entry in entries.values():
            if "error" in entry:  # the next step treats values that aren't finite as zeros
                entry["error"] = entry["error"].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return {
            "version": checkpoint.VERSION,
            "algorithm": self.algorithm,
            "options": as_dict(self.options),
            **self.settings.common(),
            **{name: getattr(self, name) for name in PROGRESS},
            "gradient_scale": self._scale,
            "errors_of": self._errors_of or owner_of(self.process_group),
            # Shows missing entries: a container that fills only the target's entries leaves none.
            "num_parameters": len(entries),
            "parameters": entries,
        }

    def shared_state_dict(self) -> dict[str, Any]:
        """Return the state_dict for a rank that joins others: errors, which are a rank's own, are zero."""
        found = self.state_dict()
        for entry in found["parameters"].values():
            if (error := entry.get("error")) is not None:
                entry["error"] = error.new_zeros((), device=error.device).expand(error.shape)  # one element
        return found | {"errors_of": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict, including its options. The process group stays.

        Saved errors go to the parameters that they were saved for, whatever buckets these parameters are in.
        Errors that don't fit start at zero, with a warning. Another rank's errors are loaded, with a warning.
        So are other options and settings than this state was given: assign yours again after loading.

        Raises TypeError for anything but a state_dict; KeyError for missing or unknown keys; ValueError for
        an unknown version, another compressor, or a value that doesn't fit. An error changes nothing.
        """
        checked = self.checked(state_dict)
        default = Settings(start_iter=self._default_start_iter)
        if texts := checkpoint.replaced(self.settings, checked, default):
            logger_of(self).warning(
                "%s: the checkpoint changes what this state was made with: %s. Its options count; to use "
                "yours, assign them after load_state_dict.",
                *(self.algorithm, ", ".join(texts)),
            )
        self._load_checked(checked)

    @torch.inference_mode(False)
    def checked(self, state_dict: Any) -> dict[str, Any]:
        """Check a state_dict, and return it in plain types. Raises the errors of load_state_dict."""
        checked = checkpoint.checked(state_dict, self.algorithm, self._compressor, self._options_class)
        self._require_start(checked["start_iter"], self._options_class(**checked["options"]))
        return checked

    def _load_checked(self, checked: dict[str, Any]) -> None:
        """Continue from a checked state_dict. The next step compares the ranks again."""
        self.settings = checkpoint.settings_of(checked, self._options_class)
        self._expect_comparison()
        self._states.load(checked["parameters"])
        for name in PROGRESS:
            setattr(self, name, checked[name])
        self._scale = checked["gradient_scale"]
        has_errors = any("error" in entry for entry in checked["parameters"].values())
        self._errors_of = checked["errors_of"] if has_errors else None

    def _warn_of_another_ranks_errors(self, group: dist.ProcessGroup) -> None:
        saved, here, self._errors_of = self._errors_of, owner_of(group), None
        if saved is None or here is None or saved["rank"] is None or saved == here:
            return
        owner, now = (f"rank {each['rank']} of {each['world_size']}" for each in (saved, here))
        logger_of(self).warning(
            "%s: the errors loaded on %s belong to %s. If several ranks load the same errors, these count "
            "several times, and the other ranks' errors are lost. Save one checkpoint per rank; or one for "
            "all, or for another world size, with consolidated_state_dict(state).",
            *(self.algorithm, now, owner),
        )

    def __getstate__(self) -> Any:
        """Return the contents of a pickle, and of a copy: everything except the process group."""
        nodes = {"ranks_per_node": self.ranks_per_node}
        if hasattr(type(self), "_compressor"):
            return {**self.state_dict(), **nodes}
        classes = {"compressor": self._compressor, "options_class": self._options_class}
        return {**classes, **nodes, "state_dict": self.state_dict()}

    def __setstate__(self, contents: Any) -> None:
        checkpoint.require_version(contents)
        if hasattr(type(self), "_compressor"):
            given = {name: value for name, value in contents.items() if name != "ranks_per_node"}
        else:
            self._compressor, self._options_class = contents["compressor"], contents["options_class"]
            given = contents["state_dict"]
        checked = self.checked(given)
        self._reset(joined_group(None), checkpoint.settings_of(checked, self._options_class))
        self._load_checked(checked)
        if "ranks_per_node" in contents:
            self.ranks_per_node = contents["ranks_per_node"]
        logger_of(self).warning(
            "NOTE: Process group will be set to a default group (i.e. the world size). If a different group "
            "is desired, please set `self.process_group` after %s state is loaded.",
            self.algorithm,
        )
