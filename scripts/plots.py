"""The common style of all figures, which are files: no choice of the user's, or of a notebook that starts a script, counts."""
import os

os.environ["MPLBACKEND"] = "Agg"  # another one may not be there, which fails the import
import matplotlib
import matplotlib.pyplot as plt

from command import whole

matplotlib.rcdefaults()
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.labelsize": 9,
                     "legend.frameon": False, "legend.fontsize": 8, "grid.alpha": 0.25, "savefig.dpi": 150,
                     "figure.constrained_layout.use": True})
note = ""  # printed at the foot of every figure


def save(figure, path):
    """As PNG."""
    if note:
        figure.supxlabel(note, fontsize=6, color="#b03a2e")
    with whole(path, "wb") as file:
        figure.savefig(file, format="png")
    plt.close(figure)
