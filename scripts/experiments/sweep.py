"""Tables and figures of the runs that scripts/mfu_sweep has collected."""
import operator

import plots
from tables import markdown, number, percent

NAME, TITLE = "sweep", "Training over meshes, strategies and modes"
KEY = "model", "tp", "dp", "strategy", "mode", "program", "options"  # identifies a run

key = operator.itemgetter(*KEY)
configuration = operator.itemgetter(*(name for name in KEY if name != "mode"))


def latest(rows):
    """The last row of each run: failed runs may have been repeated."""
    return list({key(row): row for row in rows}.values())


def label(row):
    return f"{row['model']} {row['strategy']} {row['tp']}x{row['dp']}"


def tables(rows):
    bounds = {configuration(row): row["step_ms"] for row in rows if row["mode"] == "ideal" and row["status"] == "ok"}
    lines = []
    for row in rows:
        ok, bound = row["status"] == "ok", bounds.get(configuration(row))
        lines.append({
            "model": row["model"], "mesh": f"{row['strategy']} {row['tp']}x{row['dp']}", "ranks": row["ranks"],
            "device": row["device"] if ok else "–", "mode": row["mode"],
            "step, ms": f"{row['step_ms']:.1f}" if ok else "**failed** " + " ".join(row["reason"].split())[:160].replace("|", "/"),
            "spread": f"{row['step_p10_ms']:.1f} – {row['step_p90_ms']:.1f}" if ok else "",
            "tokens/s": f"{row['tokens_per_s']:.0f}" if ok else "", "MFU": f"{percent(row['mfu_share'])} %" if ok else "",
            "exposed, ms": f"{row['exposed_ms']:.1f}" if ok else "",
            "of ideal": number(bound and row["step_ms"] / bound, 3) if ok else ""})
    return ("Median of the steps after the first and the trials; spread: 10th to 90th percentile. Last column: the step as a "
            "multiple of the step without transfers and slices (ideal), whose losses are wrong by construction.\n\n" +
            markdown(lines))


def figures(rows, folder):
    good = [row for row in rows if row["status"] == "ok"]
    groups = {configuration(row): label(row) for row in good}
    if not groups:
        return []
    order = {name: place for place, name in enumerate(plots.COLOURS)}  # others come last
    shades = plots.shades(sorted({row["mode"] for row in good}, key=lambda mode: (order.get(plots.overlap(mode), 99), mode)))
    figure, ((axes,),) = plots.panels(size=(10, 4.6))
    field, scale, unit = ("mfu_share", 100, "MFU, %") if all(row.get("mfu_share") is not None for row in good) else (
        "tokens_per_s", 1, "tokens/s")
    for i, (mode, colour) in enumerate(shades.items()):
        at = {list(groups).index(configuration(row)): row[field] * scale for row in good if row["mode"] == mode}
        axes.bar([x + (i - (len(shades) - 1) / 2) * 0.8 / len(shades) for x in at], at.values(), 0.8 / len(shades), color=colour,
                 label=mode)
    axes.set_xticks(range(len(groups)), groups.values(), rotation=30, ha="right", fontsize=8)
    axes.set_ylabel(unit)
    axes.legend(ncol=len(shades), loc="lower left", bbox_to_anchor=(0, 1))
    return plots.save(figure, folder, NAME)
