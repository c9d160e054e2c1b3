#!/bin/sh
# Install missing packages, build, run the tests and count them: the essential ones, or what the options of tests/run.py select
# (scripts/test.sh --help). The last line is `N passed, N failed`, with `, N skipped` if any were. The exit status is 0 only if
# some passed and none failed.
cd "$(dirname "$0")/.." || exit 1
case $* in
-h | --help) ;;
*) scripts/install_deps.sh || { echo "0 passed, 1 failed"; exit 1; } ;;
esac
unset MAKEFLAGS MFLAGS MAKELEVEL # of `make test`: an inner make would look for a job server that does not exist
exec "$(scripts/find_python.sh)" tests/run.py "$@" </dev/null
