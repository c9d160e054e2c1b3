"""Plot training and validation loss against the step, and print the last validation loss.

    python3 scripts/plot_loss.py LOG.jsonl PICTURE.png
"""
import sys

import plots
import run_log
from command import Problem, status_of


def smooth(values, reach):
    """Mean over `reach` steps on each side, fewer near the ends, so that it does not lag a falling curve."""
    for i in range(len(values)):
        r = min(reach, i, len(values) - 1 - i)
        yield sum(values[i - r:i + r + 1]) / (2 * r + 1)


def curve(events, kind):
    """(steps, losses), without the steps that --skip-nonfinite has skipped (null)."""
    known = [event for event in events if event["event"] == kind and event["loss"] is not None]
    return [event["step"] for event in known], [event["loss"] for event in known]


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    log, picture = sys.argv[1:]
    events = list(run_log.lines(log))
    (steps, losses), (val_steps, val_losses) = curve(events, "step"), curve(events, "val")
    if not steps:
        raise Problem(f"no step with a loss in log {log}", "wait until the run has taken steps, then plot")
    figure, ((axes,),) = plots.panels()
    axes.plot(steps, losses, color="#9db8d2", linewidth=0.7, label="training, each step")
    axes.plot(steps, list(smooth(losses, reach=1 + len(losses) // 100)), color="#1f4e79", linewidth=1.6,
              label="training, running mean")
    if val_steps:
        axes.plot(val_steps, val_losses, "o-", color="#c2410c", linewidth=1.2, markersize=4, label="validation")
        axes.annotate(f"{val_losses[-1]:.3f}", (val_steps[-1], val_losses[-1]), xytext=(0, 9), textcoords="offset points",
                      ha="right", color="#c2410c")
    axes.set(xlabel="step", ylabel="cross-entropy, nats per token")
    axes.grid()
    axes.legend()
    plots.write(figure, picture)
    if val_steps:
        print(f"{val_losses[-1]:.4f}")


if __name__ == "__main__":
    sys.exit(status_of(main))
