"""Pictures of results, with matplotlib where it is installed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Okabe and Ito's palette, which color-blind readers can distinguish too.
COLORS = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#7F7F7F"]


@contextmanager
def picture(
    path: Path, num_panels: int = 1, panel_size: tuple[float, float] = (4.5, 2.8)
) -> Iterator[list[Any]]:
    """Give the axes of panels one below another, and write them as a PNG at the end.

    panel_size: width and height in inches. Its letters can be read on a phone if it is at most 4.5 wide.

    Raises ImportError without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"axes.titlelocation": "left", "axes.titlesize": "medium"}
    from matplotlib import pyplot

    size = (panel_size[0], panel_size[1] * num_panels)
    figure, axes = pyplot.subplots(num_panels, figsize=size, layout="constrained", squeeze=False)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    yield list(axes.flat)
    figure.savefig(path, dpi=200)
    pyplot.close(figure)


def label_decades(axis: Any) -> None:
    """Label a logarithmic axis at 1, 2 and 5 times powers of ten, also over less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def write_picture(draw: Callable[[Any, Path], None], rows: Any, path: Path) -> None:
    """Draw rows, or print why there is no picture: no matplotlib, or a ValueError."""
    try:
        draw(rows, path)
        print(f"\nPicture: {path}")
    except ImportError:
        print("\nNo picture: it needs matplotlib (pip install 'gradcomp[demo]')")
    except ValueError as error:
        print(f"\nNo picture: {error}")
