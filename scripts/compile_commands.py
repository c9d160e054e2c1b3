"""Print a compile_commands.json for editors and clang tools.

    python3 scripts/compile_commands.py 'cc FLAGS…' FILE…

Each file once, with the element type and the language that the Makefile compiles it with: train_gpt.cu is C to cc.
"""
import json
import os
import shlex
import sys


def entry(command, source):
    arguments, name = shlex.split(command), os.path.basename(source)
    if "_bf16" in name:
        arguments += ["-DREAL_IS_BF16"]
    elif name.startswith("gradient_"):
        arguments += ["-DREAL_IS_DOUBLE"]
    if name.endswith(".cu"):
        arguments += ["-x", "c"]
    return {"directory": os.getcwd(), "file": source, "arguments": [*arguments, "-c", source]}


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    command, *sources = sys.argv[1:]
    json.dump([entry(command, source) for source in sources], sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
