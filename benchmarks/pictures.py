"""Pictures of results, with matplotlib where it is installed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Okabe and Ito's palette, which color-blind readers can distinguish too.
COLORS = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#7F7F7F"]


@contextmanager
def picture(
    path: Path, num_panels: int = 1, panel_size: tuple[float, float] = (5.2, 4.4), *, stacked: bool = False
) -> Iterator[list[Any]]:
    """Give the axes of panels side by side, or one below another, and write them as a PNG at the end.

    panel_size: width and height in inches.

    Raises ImportError without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows, columns = (num_panels, 1) if stacked else (1, num_panels)
    size = (panel_size[0] * columns, panel_size[1] * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    yield list(axes.flat)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_picture(draw: Callable[[Any, Path], None], rows: Any, path: Path) -> None:
    """Draw rows, or print why there is no picture: no matplotlib, or a ValueError."""
    try:
        draw(rows, path)
        print(f"\nPicture: {path}")
    except ImportError:
        print("\nNo picture: it needs matplotlib (pip install 'gradcomp[demo]')")
    except ValueError as error:
        print(f"\nNo picture: {error}")
