"""The table of the runs that scripts/mfu_sweep has collected."""
import operator

import plots
from tables import markdown, number, percent, remarks

NAME, TITLE = "sweep", "Training over meshes, strategies and modes"
KEY = "model", "tp", "dp", "strategy", "mode", "program", "options"  # identifies a run

point = operator.itemgetter(*KEY)
configuration = operator.itemgetter(*(name for name in KEY if name != "mode"))


def key(row):
    """Of one run. (Sweeps of old have no repeats.)"""
    return (*point(row), row.get("repeat", 1))


def latest(rows):
    """The last row of each run: failed runs may have been repeated."""
    return list({key(row): row for row in rows}.values())


def merged(rows):
    """A row for each point: its repeat of median step (the shorter of two in the middle), with the least and the most of the repeats,
    or, of a single one, the tenth and the ninetieth percentile of its steps. If all repeats failed, the last failure."""
    found, meshes = [], list(dict.fromkeys(map(configuration, rows)))
    in_order = sorted(rows, key=lambda row: (meshes.index(configuration(row)), plots.order(row["mode"])))
    for name in dict.fromkeys(map(point, in_order)):
        runs = [row for row in rows if point(row) == name]
        good = sorted((row for row in runs if row["status"] == "ok"), key=operator.itemgetter("step_ms"))
        if good:
            low, high = ("step_p10_ms", "step_p90_ms") if len(good) == 1 else ("step_ms", "step_ms")
            found.append({**good[(len(good) - 1) // 2], "repeats": len(good), "spread": (good[0][low], good[-1][high])})
        else:
            found.append(runs[-1])
    return found


def label(row):
    return f"{row['model']} {row['strategy']} {row['tp']}x{row['dp']}"


def tables(rows):
    rows = merged(rows)
    bounds = {configuration(row): row["step_ms"] for row in rows if row["mode"] == "ideal" and row["status"] == "ok"}
    lines = []
    for row in rows:
        ok, bound = row["status"] == "ok", bounds.get(configuration(row))
        alike = [other["mode"] for other in rows if ok and other["status"] == "ok" and other is not row and
                 configuration(other) == configuration(row) and
                 other["spread"][0] <= row["spread"][1] and row["spread"][0] <= other["spread"][1]]
        lines.append({
            "model": row["model"], "mesh": f"{row['strategy']} {row['tp']}x{row['dp']}", "ranks": row["ranks"],
            "device": row["device"] if ok else "–", "mode": row["mode"],
            "step, ms": f"{row['step_ms']:.1f}" if ok else "**failed** " + " ".join(row["reason"].split())[:160].replace("|", "/"),
            "spread": "{:.1f} – {:.1f}".format(*row["spread"]) if ok else "", "repeats": row["repeats"] if ok else "",
            "tokens/s": f"{row['tokens_per_s']:.0f}" if ok else "", "MFU": f"{percent(row['mfu_share'])} %" if ok else "",
            "exposed, ms": f"{row['exposed_ms']:.1f}" if ok else "",
            "of ideal": number(bound and row["step_ms"] / bound, 3) if ok else "",
            "remarks": remarks(alike, bound and row["step_ms"] / bound) if ok else ""})
    return ("A run's step is the median of its steps after the first and the trials. Median of the repeats, and from the least to the "
            "most (of a single one: 10th to 90th percentile of its steps); rows whose spreads overlap do not differ. Of ideal: the "
            "step as a multiple of one without transfers and slices, whose losses are wrong by construction.\n\n" +
            markdown(lines))
