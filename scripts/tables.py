"""Tables in Markdown."""


def markdown(lines):
    """The first column is left-aligned, the others right. Lines are dictionaries from heading to cell, with the same headings."""
    lines = list(lines)
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in (lines[0], rule, *map(dict.values, lines)))


def remarks(alike, of_ideal):
    """What a reader must know of a row. alike: the rows from which it does not differ. of_ideal: its multiple, None: unknown."""
    return "; ".join(["**below ideal**: noise, or a wrong measurement"] * (of_ideal is not None and of_ideal < 0.9995) +
                     [f"does not differ from {', '.join(alike)}"] * bool(alike))
