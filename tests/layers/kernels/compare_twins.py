#!/usr/bin/env python3
"""Compare what two builds of tests/layers/kernels/tool_twins.c have written: does one device compute what the other does?

    compare_twins.py FOUND EXPECTED [--json FILE] [--worst N]

Both files must come from the same seed and rounding. Every output of one must be in the other, with as many elements.
Two errors are looked at:

    whole     |found - expected| / |expected|, Euclidean norms of the whole tensor
    worst     the largest |found - expected| / (|expected| + r.m.s. of expected) of an element, which must be under ten
              times the band, or under a thirtieth if that is more: one wrong element of a million does not show in
              the whole, and an element that is rounded to bf16 is off by 0.4 % of itself

A NaN never passes; an infinity passes where the same infinity is expected. The band depends on the function and on the
coarser of the two element types, see BANDS. The table has one row per function, its worst output; the exit status is 1
if anything failed. Only the standard library is needed; numpy, where it is, saves half a minute.
"""
import argparse
import array
import json
import math
import sys

try:
    import numpy
except ImportError:
    numpy = None

# Relative error allowed in the whole of a tensor, by the start of the function's name. The second band is for tensors
# of type `real` where one of the builds has bf16: each element is rounded to 8 bits (0.17 % r.m.s.), attention rounds
# its probabilities too, and its gradient in ranges is rounded once per range. All else is fp32 in either build:
# statistics, moments, gradients of weights, sums of exact products. 0: must be exact. Where scores are far
# apart, gradients of queries are small differences of keys that are all large, and rounding shows more.
BANDS = (  # function            fp32   bf16
    ("linear_bias_grad",         1e-5,  None),
    ("linear_",                  1e-4,  1e-2),
    ("attention_backward_apart", 3e-4,  5e-2),
    ("attention_backward",       1e-4,  2e-2),
    ("attention_",               1e-4,  1e-2),
    ("embedding_forward",        0,     0),
    ("sum_of_squares",           1e-6,  None),
    ("orthogonalise",            1e-5,  5e-2),
    ("copy_block",               0,     0),
    ("convert_to_real",          0,     1e-2),
    ("convert_to_accum",         0,     0),
    ("cf_copy",                  0,     0),
    ("cf_zero",                  0,     0),
    ("",                         1e-5,  1e-2),
)
WORST_TIMES, WORST_LEAST = 10, 1 / 30


def band_of(function, rounded):
    for prefix, fp32, bf16 in BANDS:
        if function.startswith(prefix):
            return bf16 if rounded else fp32
    raise AssertionError("the last row fits all")


def read_records(path):
    """The header of the file, and its outputs by (function, tensor, case): (type, bytes, whether of type `real`)."""
    records = {}
    with open(path, "rb") as file:
        head = json.loads(file.readline() or b"{}")
        if head.get("twins") != 1:
            sys.exit(f"{path} was not written by tool_twins")
        while line := file.readline():
            if not line.endswith(b"\n"):
                print(f"{path} ends within a line")
                break
            record = json.loads(line)
            size = record["count"] * int(record["type"][1])
            data = file.read(size)
            if len(data) < size:  # its writer ended early; missing outputs are reported as such
                print(f"{path} ends within {record}")
                break
            records[record["function"], record["tensor"], record["case"]] = record["type"], data, record["real"]
    return head, records


def errors_numpy(found, expected):
    a, b = (numpy.frombuffer(data, kind).astype(numpy.float64) for kind, data, _ in (found, expected))
    same = a == b  # infinities of one sign too
    if not (numpy.isfinite(a) | same).all() or not (numpy.isfinite(b) | same).all():
        return math.inf, math.inf
    a, b = (numpy.where(numpy.isfinite(x), x, 0.0) for x in (a, b))
    difference, size = numpy.abs(a - b), float(numpy.linalg.norm(b))
    floor = numpy.abs(b) + size / math.sqrt(max(1, len(b)))
    worst = float((difference / numpy.where(floor > 0, floor, 1)).max(initial=0))
    return float(numpy.linalg.norm(difference)) / (size or 1), worst


def errors_plain(found, expected):
    a, b = (array.array("d" if kind == "f8" else "f", data) for kind, data, _ in (found, expected))
    pairs = [(x, y) for x, y in zip(a, b) if not (x == y and math.isinf(x))]
    if not all(math.isfinite(x) and math.isfinite(y) for x, y in pairs):
        return math.inf, math.inf
    size = math.sqrt(sum(y * y for _, y in pairs))
    rms = size / math.sqrt(max(1, len(b)))
    worst = max((abs(x - y) / (abs(y) + rms or 1) for x, y in pairs), default=0.0)
    return math.sqrt(sum((x - y) ** 2 for x, y in pairs)) / (size or 1), worst


def errors(found, expected):
    """(of the whole, of the worst element); infinite where a NaN is."""
    return (errors_numpy if numpy else errors_plain)(found, expected)


def count(record):
    return len(record[1]) // int(record[0][1])


def compare(found, expected, bf16):
    """One row per output: (function, tensor, case, whole, worst, band, passed, note)."""
    rows = []
    for key in sorted(found.keys() | expected.keys()):
        rounded = bf16 and (found.get(key) or expected.get(key))[2]
        band, note = band_of(key[0], rounded), ""
        if key not in found or key not in expected:
            whole = worst = math.inf
            note = "only in one of the files"
        elif count(found[key]) != count(expected[key]):
            whole = worst = math.inf
            note = f"{count(found[key])} elements, {count(expected[key])} expected"
        else:
            whole, worst = errors(found[key], expected[key])
            note = "NaN or infinity" if math.isinf(whole) else ""
        limit = max(WORST_TIMES * band, WORST_LEAST if rounded and band > 0 else 0)
        rows.append((*key, whole, worst, band, whole <= band and worst <= limit, note))
    return rows


def show(rows, worst_shown):
    print(f"{'function':<24} {'outputs':>7} {'whole':>9} {'element':>9} {'band':>8}  verdict  worst output")
    for function in sorted({row[0] for row in rows}):
        of_it = [row for row in rows if row[0] == function]
        failed = [row for row in of_it if not row[6]]
        row = max(failed or of_it, key=lambda r: (r[3], r[4]))
        print(f"{function:<24} {len(of_it):>7} {max(r[3] for r in of_it):>9.1e} {max(r[4] for r in of_it):>9.1e} "
              f"{row[5]:>8.0e}  {f'FAIL {len(failed)}' if failed else 'ok':<7}  {row[1]} of {row[2]}")
    for row in [r for r in rows if not r[6]][:worst_shown]:
        print(f"FAIL {row[0]} {row[1]}, {row[2]}: whole {row[3]:.2e}, element {row[4]:.2e}, band {row[5]:.0e} {row[7]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("found")
    parser.add_argument("expected")
    parser.add_argument("--json", metavar="FILE", help="write every row there")
    parser.add_argument("--worst", type=int, default=20, help="failed outputs to print (default 20)")
    o = parser.parse_args()
    (head, found), (other, expected) = read_records(o.found), read_records(o.expected)
    if (head["seed"], head["round"]) != (other["seed"], other["round"]):
        sys.exit(f"not the same inputs: {head} and {other}")
    rows = compare(found, expected, "bf16" in (head["real"], other["real"]))
    print(f"found {head['device']} {head['real']}, expected {other['device']} {other['real']}, seed {head['seed']}"
          f"{', inputs rounded to bf16' if head['round'] else ''}")
    show(rows, o.worst)
    failed = sum(not row[6] for row in rows)
    print(f"{len(rows) - failed} outputs agree, {failed} do not")
    if o.json:
        names = "function", "tensor", "case", "whole", "worst", "band", "passed", "note"
        finite = [[None if isinstance(x, float) and math.isinf(x) else x for x in row] for row in rows]
        with open(o.json, "w", encoding="utf-8") as file:
            json.dump({"found": head, "expected": other, "outputs": [dict(zip(names, r)) for r in finite]}, file)
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
