"""Tables: Markdown, CSV."""
import csv


def markdown(lines):
    """The first column is left-aligned, the others right. Lines are dictionaries from heading to cell."""
    cells = [f"| {' | '.join(map(str, line))} |" for line in (lines[0], *(line.values() for line in lines))]
    return "\n".join([cells[0], "|---|" + "---:|" * (len(lines[0]) - 1), *cells[1:]]) + "\n"


def write_csv(path, rows):
    """A line for each row, with the columns of all rows."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
        writer.writeheader()
        writer.writerows(rows)


def number(value, digits=2):
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def percent(share, digits=1):
    return number(None if share is None else 100 * share, digits)
