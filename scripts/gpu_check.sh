#!/usr/bin/env bash
# Check and measure the GPU program on this machine within a time budget: runs scripts/gpu_check.py with a Python that has numpy, if
# there is one. scripts/gpu_check.sh --help lists the options.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
command -v make >/dev/null || PATH=$PWD/build/deps/bin:$PATH # carried along
exec "$(scripts/find_python.sh)" scripts/gpu_check.py "$@"
