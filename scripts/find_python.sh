#!/bin/sh
# Print a Python 3 that has numpy and matplotlib: the first on PATH, or the system's own (whose packages
# scripts/install_deps.sh installs); failing both, plain python3.
for python in "$PYTHON" python3 /usr/bin/python3; do
    [ -n "$python" ] || continue
    if "$python" -c 'import numpy, matplotlib' >/dev/null 2>&1; then
        command -v "$python"
        exit 0
    fi
done
echo python3
