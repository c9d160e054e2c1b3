"""Plot training and validation loss against the step.

    python3 scripts/plot_loss.py LOG.jsonl PICTURE.png
"""
import sys

import run_log


def read(path, kind):
    """steps, losses of one kind of event in a log"""
    events = run_log.with_loss(run_log.read(path, kind, ("step", "loss")))
    return [event["step"] for event in events], [event["loss"] for event in events]


def smooth(values, reach):
    """Mean over `reach` steps to either side, fewer towards the ends: no lag behind a falling curve."""
    for i in range(len(values)):
        r = min(reach, i, len(values) - 1 - i)
        yield sum(values[i - r:i + r + 1]) / (2 * r + 1)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    log, picture = sys.argv[1:]
    steps, losses = read(log, "step")
    if not steps:
        sys.exit(f"error: no step with a loss in log {log}\nhint:  let the run come further, then plot")
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="#9db8d2", linewidth=0.7, label="training, each step")
    axes.plot(steps, list(smooth(losses, reach=1 + len(losses) // 100)), color="#1f4e79", linewidth=1.6, label="training, running mean")
    steps, losses = read(log, "val")
    if steps:
        axes.plot(steps, losses, "o-", color="#c2410c", linewidth=1.2, markersize=4, label="validation")
        axes.annotate(f"{losses[-1]:.3f}", (steps[-1], losses[-1]), xytext=(0, 9), textcoords="offset points",
                      ha="right", color="#c2410c")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats per token")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
