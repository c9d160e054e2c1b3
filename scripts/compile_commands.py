"""Print a compile_commands.json for editors and clang tools.

    python3 scripts/compile_commands.py 'cc FLAGS…' FILE…

Each file once, with the element type and the language that the Makefile compiles it with: train_gpt.cu is C to cc.
"""
import json
import os
import shlex
import sys

if len(sys.argv) < 3:
    sys.exit(__doc__)
command, *sources = sys.argv[1:]
entries = []
for source in sources:
    name = os.path.basename(source)
    element = ["-DREAL_IS_BF16"] if "_bf16" in name else ["-DREAL_IS_DOUBLE"] if name.startswith("gradient_") else []
    language = ["-x", "c", '-DVERSION=""', '-DOTHER_PROGRAM=""'] if name.endswith(".cu") else []
    entries.append({"directory": os.getcwd(), "file": source,
                    "arguments": [*shlex.split(command), *element, *language, "-c", source]})
print(json.dumps(entries, indent=1))
