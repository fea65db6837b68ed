"""The text that GPTs train on: the source of Python's own standard library, as bytes.

``read_once`` takes the sources of installed packages, too.
"""

import math
import os
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

MAX_BYTES, MIN_BYTES = 4_000_000, 200_000
VALIDATION_FRACTION = 0.1
HELD_OUT_BYTES = 1_000_000  # by read_once

NUM_WORDS, SUCCESSORS = 32768, 16  # of sentences
NUM_STREAMS = 4096  # of words, which are written at once

# Third-party packages, tests, tables of characters, generated files.
SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("encodings", "pydoc_data", "lib2to3"),
}


@cache  # every run of a program reads it
def read_corpus(folder: str) -> tuple[Tensor, Tensor]:
    """Read the Python files under ``folder``, in sorted order: (bytes to train on, bytes to validate on).

    Reading stops at the file that passes ``MAX_BYTES``. The last whole files, a tenth of the bytes, are
    held out for validation. Raises FileNotFoundError if there is too little to learn from.
    """
    texts = _read(iter(sorted(_sources(folder))), MAX_BYTES)
    num_bytes = sum(map(len, texts))
    if num_bytes < MIN_BYTES:
        raise FileNotFoundError(
            f"found {num_bytes} bytes of Python source under {folder!r}, too few to train on: is "
            "this Python installed without its standard library's source (zipped, or .pyc only)?"
        )
    held_out: list[bytes] = []
    while sum(map(len, held_out)) < VALIDATION_FRACTION * num_bytes:
        held_out.insert(0, texts.pop())
    return _as_tensor(texts), _as_tensor(held_out)


def read_once(folders: Sequence[str], sequence: int, num_windows: int) -> tuple[Tensor, Tensor]:
    """Read ``num_windows`` windows of ``sequence + 1`` bytes to train on, and other files to validate on.

    The windows, windows × (sequence + 1) in uint8, don't overlap. Files come in the order of their names'
    hashes, which mixes the packages; the first ones, of ``HELD_OUT_BYTES``, are held out as bytes. Raises
    ValueError if the Python files under ``folders`` are too few.
    """
    named = {str(path.relative_to(folder)): path for folder in folders for path in _sources(folder)}
    paths = iter([named[name] for name in sorted(named, key=lambda name: sha256(name.encode()).digest())])
    held_out = _as_tensor(_read(paths, HELD_OUT_BYTES))
    num_bytes = num_windows * (sequence + 1)
    text = _as_tensor(_read(paths, num_bytes))
    if len(text) < num_bytes:
        raise ValueError(
            f"{num_bytes:,} bytes are to be read once, but the sources of Python and of its packages "
            f"have {len(text):,}: train a smaller model, on fewer tokens, or install more packages"
        )
    return text.unfold(0, sequence + 1, sequence + 1)[:num_windows], held_out


def _read(paths: Iterator[Path], num_bytes: int) -> list[bytes]:
    """Read files until they have this number of bytes, or until there are no more."""
    texts: list[bytes] = []
    found = 0
    while found < num_bytes and (path := next(paths, None)):
        texts.append(path.read_bytes())
        found += len(texts[-1])
    return texts


def _sources(folder: str) -> Iterator[Path]:
    """Yield the Python files under ``folder``."""
    for parent, folders, names in os.walk(folder):
        folders[:] = set(folders) - SKIPPED_FOLDERS
        yield from (Path(parent, name) for name in names if name.endswith(".py"))


def _as_tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


@cache  # simulated ranks share it
def sentences(num_bytes: int, seed: int) -> tuple[Tensor, float]:
    """Write text whose entropy is known, as long as wanted: (the bytes, the entropy in nats per byte).

    One of ``SUCCESSORS`` words follows a word, with probabilities as 1, 1/2, 1/3 and so on: the first of few
    common words, the second of more and rarer ones, and the last of the rarest. Which one of them follows
    from the word. So a small model learns something, and a larger one more. The entropy is of a reader
    who knows all words and what follows them.
    """
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(97, 123, (NUM_WORDS, 5), generator=generator, dtype=torch.uint8).unique(dim=0)
    letters = letters[torch.randperm(len(letters), generator=generator)]
    # Of a multiple of SUCCESSORS ** 3 words, no word is among the successors of another word twice.
    spelled = functional.pad(letters[: len(letters) // SUCCESSORS**3 * SUCCESSORS**3], (0, 1), value=ord(" "))
    place = torch.randperm(len(spelled), generator=generator).double() / len(spelled)
    chances = 1 / torch.arange(1.0, SUCCESSORS + 1, dtype=torch.float64)
    chances /= chances.sum()
    num_steps = math.ceil(num_bytes / (NUM_STREAMS * spelled.shape[1]))
    words = torch.empty(num_steps, NUM_STREAMS, dtype=torch.int32)
    now = torch.randint(len(spelled), (NUM_STREAMS,), generator=generator)
    for row in words:
        next_one = torch.multinomial(chances, NUM_STREAMS, replacement=True, generator=generator)
        now = (((next_one + place[now]) / SUCCESSORS) ** 3 * len(spelled)).long()
        row.copy_(now)
    entropy = float(-(chances * chances.log()).sum()) / spelled.shape[1]
    return spelled[words.T.flatten()].flatten()[:num_bytes], entropy


class Windows:
    """The windows of ``sequence + 1`` bytes that one rank draws from a text.

    They depend on the seed, the rank and the number of ranks alone, so that every hook trains on the same
    data in the same order.
    """

    def __init__(self, text: Tensor, sequence: int, seed: int, rank: int, ranks: int) -> None:
        self._windows = text.unfold(0, sequence + 1, 1)
        self._generator = torch.Generator().manual_seed(seed * ranks + rank)

    def draw(self, batch: int) -> Tensor:
        """Draw the next ``batch`` random windows: batch × (sequence + 1), int64."""
        starts = torch.randint(len(self._windows), (batch,), generator=self._generator)
        return self._windows[starts].long()


def spread(text: Tensor, sequence: int, count: int) -> Tensor:
    """Return windows at equal distances in a text: count × (sequence + 1), int64."""
    starts = torch.linspace(0, len(text) - sequence - 1, count).long()
    return text.unfold(0, sequence + 1, 1)[starts].long()
