#!/bin/sh
# Print a Python 3.9 or later that has numpy and matplotlib: the first on PATH, or the system's (whose packages
# scripts/install_deps.sh installs); failing both, plain python3.
for python in "$PYTHON" python3 /usr/bin/python3; do
    # Not imported, which takes a second from a cold disk.
    if "$python" -c 'import sys, importlib.util as u
sys.exit(sys.version_info < (3, 9) or None in map(u.find_spec, ("numpy", "matplotlib")))' 2>/dev/null
    then
        command -v "$python"
        exit 0
    fi
done
echo python3
