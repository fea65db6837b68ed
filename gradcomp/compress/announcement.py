"""What a state says of bytes, and of a checkpoint's entries."""

from collections.abc import Iterator, Sequence

from .parameter_keys import is_name


def saved_bytes(gradient_bytes: int, sent_bytes: int) -> str:
    """Say how many bytes are sent, and how many times fewer these are."""
    if sent_bytes < gradient_bytes:
        rate = f"{gradient_bytes / sent_bytes:.1f} times fewer bytes" if sent_bytes else "no bytes"
    else:
        rate = f"{sent_bytes / gradient_bytes:.2f} times as many bytes"
    return f"{rate}, {shown_bytes(sent_bytes)} of {shown_bytes(gradient_bytes)}"


def shown_bytes(num_bytes: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def unclaimed_entries(keys: Sequence[str]) -> Iterator[str]:
    """Yield warnings of a checkpoint's entries for parameters that the first step did not bring."""
    if names := list(filter(is_name, keys)):
        yield with_keys(
            "the checkpoint has errors of parameters that the first step did not bring: %s. They wait "
            "for them. Likely cause: another model, or this run has no names of parameters: call "
            "state.number_parameters(model.named_parameters())",
            names,
        )
    if places := [key for key in keys if not is_name(key)]:
        yield with_keys(
            "the checkpoint knows parameters by the first step's buckets, and this run's first step has "
            "others, or names: the errors of %s start at zero. Likely cause: another bucket_cap_mb, "
            "find_unused_parameters or model. Call state.number_parameters(model.named_parameters()) in "
            "both runs, and checkpoints know parameters by name",
            places,
        )


def with_keys(text: str, keys: Sequence[str]) -> str:
    """Return a text with the first of these keys in the place of %s."""
    return text % (", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else ""))
