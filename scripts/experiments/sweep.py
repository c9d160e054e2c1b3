"""What scripts/mfu_sweep has collected: end-to-end runs over meshes, strategies, modes and models, on any machine.

Its rows come from a file, so there is nothing to measure here; only tables and figures.
"""
NAME, TITLE = "sweep", "Training over meshes, strategies and modes"
KEY = "model", "tp", "dp", "strategy", "mode", "program", "options"  # which run it is
COLOURS = {"none": "#b03a2e", "slice": "#d68910", "commfuse": "#1f618d", "nowire": "#707b7c"}


def key(row):
    return tuple(row[name] for name in KEY)


def latest(rows):
    """The last row of each run: a run that had failed may have been repeated."""
    return list({key(row): row for row in rows}.values())


def configuration(row):
    return tuple(row[name] for name in KEY if name != "mode")


def label(row):
    return f"{row['model']} {row['strategy']} {row['tp']}x{row['dp']}"


def overlap(mode):
    return mode.split(":")[0]


def shade(mode, modes):
    """Of modes that differ in route or slices alone, the later ones are paler."""
    alike = [other for other in modes if overlap(other) == overlap(mode)]
    return 1 - 0.6 * alike.index(mode) / len(alike)


def number(row, name, form, scale=1.0):
    return "–" if row.get(name) is None else form.format(row[name] * scale)


def tables(rows):
    bounds = {configuration(row): row["step_ms"] for row in rows if row["mode"] == "nowire" and row["status"] == "ok"}
    lines = ["Median of the steps behind the first; spread from the 10th to the 90th percentile. The last column is "
             "the step against that without transfers (nowire), whose losses are wrong by construction.", "",
             "| model | mesh | ranks | device | mode | step, ms | spread | tokens/s | MFU | exposed, ms | of nowire |",
             "|---|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        head = f"| {row['model']} | {row['strategy']} {row['tp']}x{row['dp']} | {row['ranks']} | "
        if row["status"] != "ok":
            why = " ".join(row["reason"].split())[:160].replace("|", "/")
            lines.append(f"{head}– | {row['mode']} | **failed** {why} | | | | | |")
            continue
        bound = bounds.get(configuration(row))
        lines.append(
            f"{head}{row['device']} | {row['mode']} | {row['step_ms']:.1f} | {row['step_p10_ms']:.1f} – "
            f"{row['step_p90_ms']:.1f} | {row['tokens_per_s']:.0f} | {number(row, 'mfu_share', '{:.1f} %', 100)} | "
            f"{row['exposed_ms']:.1f} | {format(row['step_ms'] / bound, '.3f') if bound else '–'} |")
    return "\n".join(lines) + "\n"


def figures(rows, folder):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    good = [row for row in rows if row["status"] == "ok"]
    groups = list(dict.fromkeys(map(configuration, good)))
    modes = sorted(dict.fromkeys(row["mode"] for row in good), key=lambda mode: list(COLOURS).index(overlap(mode)))
    if not groups:
        return []
    figure, axes = plt.subplots(figsize=(10, 4.6))
    figure.subplots_adjust(left=0.09, right=0.99, top=0.9, bottom=0.3)
    share = all(row.get("mfu_share") is not None for row in good)
    field, scale = ("mfu_share", 100) if share else ("tokens_per_s", 1)
    for i, mode in enumerate(modes):
        at = {groups.index(configuration(row)): row[field] * scale for row in good if row["mode"] == mode}
        axes.bar([x + (i - (len(modes) - 1) / 2) * 0.8 / len(modes) for x in at], at.values(), 0.8 / len(modes),
                 color=COLOURS[overlap(mode)], alpha=shade(mode, modes), label=mode)
    names = [label(next(row for row in good if configuration(row) == group)) for group in groups]
    axes.set_xticks(range(len(groups)), names, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("MFU, %" if share else "tokens/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncol=len(modes), loc="lower left", bbox_to_anchor=(0, 1))
    names = [f"{NAME}.png", f"{NAME}.svg"]
    for name in names:
        figure.savefig(f"{folder}/{name}", dpi=120)
    plt.close(figure)
    return names
