"""The common style of all figures."""
from command import whole

STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.labelsize": 9, "legend.frameon": False,
         "legend.fontsize": 8, "grid.alpha": 0.25, "savefig.dpi": 150}
note = ""  # printed at the foot of every figure


def pyplot():
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update(STYLE)
    return plt


def panels(down, across, size):
    """A figure and its (down, across) axes."""
    return pyplot().subplots(down, across, figsize=size, squeeze=False, layout="constrained")


def save(figure, path):
    """As PNG."""
    if note:
        figure.supxlabel(note, fontsize=6, color="#b03a2e", y=0.004)
    with whole(path, "wb") as file:
        figure.savefig(file, format="png")
    pyplot().close(figure)
