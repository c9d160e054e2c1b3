"""Print a compile_commands.json for editors and clang tools.

    python3 scripts/compile_commands.py 'cc FLAGS…' FILE…

train_gpt.cu is C to cc, so it is compiled with -x c, as the Makefile does.
"""
import json
import os
import shlex
import sys


def entry(command, source):
    arguments = shlex.split(command)
    if source.endswith(".cu"):
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
