"""The common style of all figures, and the colours of the overlap modes."""
import os
import re

from command import whole

COLOURS = {"none": "#b03a2e", "slice": "#d68910", "ring": "#1f618d", "commfuse": "#1f618d", "direct": "#5499c7", "once": "#7d3c98",
           "levels": "#148f77", "auto": "#1e8449", "nowire": "#707b7c", "ideal": "#17202a"}
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.labelsize": 9, "legend.frameon": False,
         "legend.fontsize": 8, "grid.alpha": 0.25, "savefig.dpi": 150, "svg.hashsalt": "commfuse"}
note = ""  # printed at the foot of every figure


def pyplot():
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update(STYLE)
    return plt


def panels(down=1, across=1, size=(8, 4.5), **options):
    """A figure and its (down, across) axes."""
    return pyplot().subplots(down, across, figsize=size, squeeze=False, layout="constrained", **options)


def overlap(mode):
    """The overlap of a mode of bench_train: "slice" for "slice:8", "ring" for "ring:4+end"."""
    return re.split(r"[: +]", mode)[0]


def shades(modes):
    """Mode → colour; modes of the same overlap get paler shades of its colour."""
    from matplotlib.colors import to_rgba
    found = {}
    for mode in modes:
        alike = [other for other in modes if overlap(other) == overlap(mode)]
        found[mode] = to_rgba(COLOURS.get(overlap(mode), "#555555"), 1 - 0.6 * alike.index(mode) / len(alike))
    return found


def legend_below(figure, handles, columns, lines):
    """One legend for all axes, below them."""
    share = 0.25 * lines / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, share, 1, 1 - share))
    figure.legend(handles.values(), handles, loc="lower center", ncols=columns)


def write(figure, path):
    with whole(path, "wb") as file:
        figure.savefig(file, format=os.path.splitext(path)[1][1:])


def save(figure, path):
    """As PNG and SVG."""
    if note:
        figure.supxlabel(note, fontsize=6, color="#b03a2e", y=0.004)
    for kind in "png", "svg":
        write(figure, f"{path}.{kind}")
    pyplot().close(figure)
