#!/usr/bin/env bash
# Install missing packages, build, run the tests and count them.
#
#     scripts/test.sh [--all | --only PATTERN] [--san address,undefined | --san thread] [--jobs N] [--list]
#
#     (nothing)        the essential tests of every part: at most 8 minutes on two cores
#     --all            everything, sanitizer builds included: at most 25 minutes
#     --only PATTERN   programs whose name contains PATTERN (fuse, layers/, gradient_*), or else single cases
#     --san LIST       all of a sanitizer build: address,undefined; or thread, which runs tests/commfuse alone
#     --jobs N         test programs at a time; default: as many as there are cores, at least 4, since many wait
#     --list           print the programs, run nothing
#
# The last line is `N passed, N failed`, with `, N skipped` if any were. The exit status is 0 only if some
# passed and none failed.
set -u
cd "$(dirname "$0")/.." || exit 1

all= only= san= jobs= list=
while [ $# -gt 0 ]; do
    case $1 in
    --only | --san | --jobs)
        [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
        declare "${1#--}=$2"
        shift ;;
    --all | --list) declare "${1#--}=$1" ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "scripts/${0##*/}"; exit 0 ;;
    *) echo "error: unknown option $1 (see scripts/test.sh --help)" >&2; exit 2 ;;
    esac
    shift
done

give_up() {
    echo "error: $1" >&2
    echo "0 passed, 1 failed"
    exit 1
}

scripts/install_deps.sh || give_up "a package for building or testing is missing, see above"

# With the variables of `make test`, the inner make would look for a job server that does not exist.
unset MAKEFLAGS MFLAGS MAKELEVEL
sans=("$san")
[ -z "$all" ] || [ -n "$san" ] || sans=("" thread address,undefined)
run=("$(scripts/find_python.sh)" tests/run.py ${only:+--only "$only"} ${jobs:+--jobs "$jobs"})
[ -n "$all$only$san$list" ] || run+=(--quick)
run+=(--builds)
for san in "${sans[@]}"; do
    variant=${san:+san-${san//,/-}}
    builds+=("${variant:-release}")
done
[ -z "$list" ] || exec "${run[@]}" "${builds[@]}" --list
if "${run[@]}" "${builds[@]}" --need-venv; then
    scripts/install_deps.sh --bpe --log-to || echo "the tests of the GPT-2 encoding, or of log_to.py, will be skipped"
fi
for i in "${!sans[@]}"; do
    targets=$("${run[@]}" "${builds[@]}" --targets "${builds[i]}") || give_up "there is nothing to run"
    # shellcheck disable=SC2086 # a list of names without spaces
    make --no-print-directory -s -O -j"$(nproc)" SAN="${sans[i]}" $targets </dev/null || give_up "the build failed, see above"
done
exec "${run[@]}" "${builds[@]}" </dev/null
