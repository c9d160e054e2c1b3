"""Write inputs for a fuzz target to start from, sound ones and some that are nearly so.

    python3 tests/fuzz/seeds.py TARGET FOLDER
"""
import json
import os
import struct
import sys


def headed(words, data):
    return bytes([len(words)]) + struct.pack(f"<{len(words)}i", *words) + data


def raw(words, data):
    return b"\xff" + struct.pack("<256i", *words, *[0] * (256 - len(words))) + data


def tokens():
    for count in 0, 9, 300:
        data = struct.pack(f"<{count}H", *(i * 37 % 50000 for i in range(count)))
        for T in 0, 7, 63, 128 + 20:
            yield bytes([T]) + headed((20240520, 1, count), data)
    yield bytes([7]) + raw((20240520, 1, 300), data)
    yield bytes([7]) + headed((20240801, 1, 300), data)
    for count in 9, 300:
        data = struct.pack(f"<{count}I", *(i * 377 % 150000 for i in range(count)))
        for T in 0, 7, 128 + 20:
            yield bytes([T]) + headed((20240801, 7, count), data)


def model():
    for maxT, V, L, heads, C, Vp in (1, 1, 1, 1, 1, 1), (2, 3, 2, 2, 4, 5), (3, 5, 1, 3, 3, 8):
        parameters = Vp * C + maxT * C + L * (12 * C * C + 13 * C) + 2 * C
        for version, width in (3, 4), (5, 2):
            data = bytes(i * 11 % 256 for i in range(parameters * width))
            yield headed((20240326, version, maxT, V, L, heads, C, Vp), data)
            yield raw((20240326, version, maxT, V, L, heads, C, Vp), data)
    for heads, KV, C, F, numbers in (2, 2, 4, 3, (1e-5, 1e4, 0, 0, 0, 0)), (4, 2, 8, 5, (1e-6, 5e5, 32, 1, 4, 8192)):
        parameters = 8 * C + 2 * ((C + 2 * KV * C // heads) * C + C * C + 3 * F * C + 2 * C) + C
        more = struct.unpack("<5i", struct.pack("<5f", *numbers[:5])) + numbers[5:]
        for version, width in (3, 4), (5, 2):
            data = bytes(i * 11 % 256 for i in range(parameters * width))
            yield headed((20261129, version, 7, 5, 2, heads, C, 8, KV, F, *more), data)
            yield headed((20261129, version, 7, 5, 2, heads, C, 8, KV, F + 1, *more), data)


def state():
    def runs(*each):
        return b"".join(bytes(run) for run in each)

    ask = bytes([255, 0, 0, 0, 20, 0, 0, 5, 10, 1, 2, 0, 8, 3, 3, 0, 1])
    second = 128  # of the two files
    yield bytes([20]) + runs((0, 0, 0, 20, 0)) + ask
    yield bytes([20]) + runs((0, 0, 0, 10, 0), (0, 0, 10, 10 + second, 5), (1, 2, 0, 8, 10)) + ask
    yield bytes([20]) + runs((0, 0, 10, 10, 0), (0, 0, 0, 10, 10), (1, 2, 4, 4 + second, 0), (1, 2, 0, 4, 3)) + ask
    yield bytes([20]) + runs((0, 0, 0, 11, 0), (0, 0, 10, 10, 10)) + ask  # an element twice
    yield bytes([20]) + runs((0, 0, 0, 21, 0)) + ask                      # outside of the file
    yield bytes([20]) + runs((0, 0, 121, 10, 122), (120, 0, 0, 1, 1)) + ask


    for runs, elements, change in (0, 3, ("", "")), (1, 3, ("", "")), (1, 3, ("F32", "F16")), (1, 3, ("[3]", "[9]")):
        at, header = 40 * runs, {"runs": {"dtype": "I64", "shape": [runs, 5], "data_offsets": [0, 40 * runs]}}
        for name in "weight", "m", "v":
            header[name] = {"dtype": "F32", "shape": [elements], "data_offsets": [at, at := at + 4 * elements]}
        text = json.dumps(header, separators=(",", ":")).replace(*change).encode()
        text += b" " * (-(8 + len(text)) % 64)
        yield b"\xff" + struct.pack("<Q", len(text)) + text + struct.pack(f"<{5 * runs}q", *[0, 0, 0, 3, 0] * runs) + \
            bytes(12 * elements)


def manifest():
    for ranks, options in (1, {}), (3, {"tp": "2", "train": "a \"b\"\n", "é": ""}):
        files = [{"name": f"rank_{rank:05d}.safetensors", "bytes": 4096 + rank, "xxh64": f"{rank * 12345:016x}"}
                 for rank in range(ranks)]
        text = json.dumps({"format": "commfuse checkpoint", "version": 1, "step": 123, "ranks": ranks,
                           "options": options, "files": files})
        yield b"\x01" + text[:-1].encode() + b",\n"
        yield b"\0" + text.encode()
        yield b"\x01" + text[:-1].replace('"tp": "2"', '"tp": "2", "tp": "4"').encode() + b",\n"
        yield b"\x01" + text[:-1].replace("123", "999999999999999").encode() + b",\n"


def options():
    yield b""
    yield b"--help\n--dry-run"
    yield b"--model\nd12\n--seq=64\n--tp=2\n--dp\n2\n--overlap=ring:4\n--gradients\nready\n--prefetch=2"
    yield b"--route=direct\n--overlap=slice\n--slices=4"
    yield b"--layers=3\n--channels=96\n--heads=4\n--lr=3e-4\n--beta2=0.95\n--clip=1\n--warmup=10\n--schedule=wsd"
    yield b"--train=a*.bin\n--val\nb.bin\n--trace=t.json\n--trace-steps=3:7\n--timeout=30\n--dtype=bf16"


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("tokens", "model", "manifest", "state", "options"):
        sys.exit(__doc__)
    target, folder = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    for i, seed in enumerate(globals()[target]()):
        with open(os.path.join(folder, f"seed_{i:02d}"), "wb") as file:
            file.write(seed)


if __name__ == "__main__":
    main()
