#!/usr/bin/env bash
# Everything from a fresh clone to a verdict: install what is missing, build, run the tests, count.
#
#     scripts/test.sh [--only PATTERN] [--san address,undefined | --san thread] [--jobs N] [--list]
#
#     --only PATTERN   programs whose name contains PATTERN (fuse, layers/, gradient_*), or else single cases
#     --san LIST       in a sanitizer build: address,undefined; or thread, which runs tests/commfuse alone
#     --jobs N         test programs at a time; default 1, since most want more than one core themselves
#     --list           print what there is, run nothing
#
# The last line is `N passed, N failed`, with `, N skipped` if any were. The exit status is 0 only if some
# passed and none failed.
set -u
cd "$(dirname "$0")/.." || exit 1

only= san= jobs=1 list=
while [ $# -gt 0 ]; do
    case $1 in
    --only | --san | --jobs)
        [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
        declare "${1#--}=$2"
        shift ;;
    --list) list=--list ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown option $1 (see scripts/test.sh --help)" >&2; exit 2 ;;
    esac
    shift
done

give_up() {
    echo "error: $1" >&2
    echo "0 passed, 1 failed"
    exit 1
}

scripts/install_deps.sh || give_up "something that building or testing needs is missing, see above"

# Make's own variables, if this is `make test`, would make the inner make a child of a job server that is not there.
unset MAKEFLAGS MFLAGS MAKELEVEL
variant=${san:+san-${san//,/-}}
build=build/${variant:-release}
run=("$(scripts/find_python.sh)" tests/run.py --build "$build" --only "$only" --jobs "$jobs")
[ -z "$list" ] || exec "${run[@]}" --list
if "${run[@]}" --need-venv; then
    scripts/install_deps.sh --bpe || echo "the tests of the GPT-2 encoding will be skipped"
fi
targets=build-tests
if [ -n "$only" ] || [ "$san" = thread ]; then
    targets=$("${run[@]}" --targets) || give_up "there is nothing to run"
fi
# shellcheck disable=SC2086 # a list of names without spaces
make --no-print-directory -s -O -j"$(nproc)" SAN="$san" $targets </dev/null || give_up "the build failed, see above"
exec "${run[@]}" </dev/null
