#!/bin/sh
# Install missing packages for building, testing and the demo, on Debian, Ubuntu and similar systems.
#
#     scripts/install_deps.sh                compiler, make, MPI, oneDNN, cJSON, xxHash, cmocka, numpy, mpi4py, matplotlib
#     scripts/install_deps.sh --bpe          also build/venv with tiktoken, for data/prepare.py --encoding gpt2
#     scripts/install_deps.sh --mutants      also build/venv with universalmutator, for tests/mutants.py
#     scripts/install_deps.sh --torch        also build/venv with PyTorch, for tests/bench/torch_ranks.py: 7 GB
#     scripts/install_deps.sh --slurm        and --lint, --simgrid: also Slurm, clang's tools, SimGrid and Graphviz, for tests
#     scripts/install_deps.sh --aarch64      also a compiler for aarch64, an emulator of it, and in build/aarch64 its libraries
#     scripts/install_deps.sh --carry        also copies of cJSON, xxHash and make in build/deps, where make finds
#                                            them: for a GPU machine that has a CUDA toolkit and no network
#
# A package counts as present if it is installed, or if a probe finds its content (another compiler, a module system, another
# distribution). Missing ones are printed with the reason, then installed as root or through sudo. If nothing is missing, this takes
# some milliseconds.
set -u
cd "$(dirname "$0")/.." || exit 1

for argument in "$@"; do
    case $argument in
    --bpe | --mutants | --torch | --slurm | --lint | --simgrid | --aarch64 | --carry) ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "scripts/${0##*/}"; exit 0 ;;
    *) echo "error: unknown option $argument (known: --bpe, --mutants, --torch, --slurm, --lint, --simgrid, --aarch64, --carry, --help)" >&2; exit 2 ;;
    esac
done
options=" any $* "
# Where the lab can run (root, and namespaces may be made), demo.sh and the tests show steps over a slow link.
unshare --net true 2>/dev/null && options="$options lab "
want() { case $options in *" $1 "*) ;; *) return 1 ;; esac; }

die() { printf '%s\n' "$@" >&2; exit 1; }
header() { echo "#include <$1>" | cc -E -x c - >/dev/null 2>&1; }
program() { command -v "$1" >/dev/null 2>&1; }
module() { MPLBACKEND=Agg "$(scripts/find_python.sh)" -c "import $1" >/dev/null 2>&1; }

# option that wants it | package | probe | reason
needed="\
any|gcc|program cc|the C compiler
any|g++|program g++|compiles the GPU sources for the emulator in the tests
any|libc6-dev|header stdio.h|the C library's headers
any|make|program make|the build
any|openmpi-bin|program mpirun|mpirun: several ranks on one machine or many
any|libopenmpi-dev|program mpicc|MPI: transfers between ranks
any|libdnnl-dev|header dnnl.h|oneDNN: matrix multiplication on CPUs
any|libcjson-dev|header cjson/cJSON.h|cJSON: the log, the descriptions of checkpoints
any|libxxhash-dev|header xxhash.h|xxHash: the hashes of checkpoints
any|libcmocka-dev|header cmocka.h|cmocka: the C tests
any|pkg-config|program pkg-config|the test of the library's examples
any|python3|program python3|data preparation, the test runner
any|python3-numpy|module numpy|data preparation, reference results in tests
any|python3-mpi4py|module mpi4py|the test of the library beside another user of MPI
any|python3-matplotlib|module matplotlib|plots
lab|iproute2|program tc|the lab: two hosts made of this machine, a link of known speed between them
--bpe|python3-venv|module ensurepip|an environment in build/venv for what comes from PyPI
--mutants|python3-venv|module ensurepip|an environment in build/venv for what comes from PyPI
--torch|python3-venv|module ensurepip|an environment in build/venv for what comes from PyPI
--torch|python3-dev|header python3.11/Python.h|torch.compile's C++
--slurm|slurmctld|program slurmctld|Slurm's controller
--slurm|slurmd|program slurmd|Slurm's nodes
--slurm|slurm-client|program srun|srun, sbatch
--slurm|munge|program munged|authentication between Slurm's daemons
--simgrid|libsimgrid-dev|false|another simulator of networks
--simgrid|graphviz|program dot|reads the graph of a prediction
--aarch64|gcc-aarch64-linux-gnu|program aarch64-linux-gnu-gcc|compiles for hosts of aarch64
--aarch64|libc6-dev-arm64-cross|false|their C library
--aarch64|qemu-user|program qemu-aarch64|runs programs for them
--lint|clang-format|program clang-format|the format of the C sources
--lint|clang-tidy|program clang-tidy|checks of the C sources"

installed=$(dpkg-query -W -f '${Package}=${db:Status-Status} ' $(echo "$needed" | cut -d'|' -f2) 2>/dev/null)

missing=
reasons=
while IFS='|' read -r option package probe reason; do
    want "$option" || continue
    case " $installed" in *" $package=installed "*) continue ;; esac
    $probe && continue
    missing="$missing $package"
    reasons="$reasons
    $package: $reason"
done <<END
$needed
END

if [ -n "$missing" ]; then
    program apt-get || die "error: no apt-get here, and these are missing (names as in Debian):$reasons" \
        "hint:  install them with this system's package manager, then run this again"
    as_root=
    [ "$(id -u)" -eq 0 ] || as_root=sudo
    echo "installing with apt-get${as_root:+, through sudo}, no recommended extras:$reasons"
    apt() { $as_root env DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 apt-get -q -o Acquire::Retries=3 \
        -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0 "$@" </dev/null; }
    said=$({ apt update && apt install -y --no-install-recommends $missing; } 2>&1) ||
        die "$said" "error: apt-get could not install:$missing" "hint:  see above; libdnnl-dev is in Ubuntu's universe"
    echo "installed$missing"
fi

# headers_of NAME PATTERN: the paths of header NAME and of those it includes, if they match
headers_of() { echo "#include <$1>" | cc -E -x c - 2>/dev/null | sed -n "s|^# 1 \"\(/.*$2\)\".*|\1|p" | sort -u; }

# xxHash is one header, cJSON a header and a library. make may be missing in images with a CUDA toolkit (scripts/gpu_check.sh finds
# this copy), and a tree without git history does not know its version. Written beside, then renamed.
if want --carry; then
    to=build/deps.tmp
    rm -rf $to && mkdir -p $to/include/cjson $to/lib $to/bin &&
        cp -L "$(command -v make)" $to/bin/make &&
        { git describe --always --dirty 2>/dev/null || echo unknown; } >$to/version &&
        cp $(headers_of cjson/cJSON.h cJSON.h) $to/include/cjson/ && cp $(headers_of xxhash.h xxhash.h) $to/include/ &&
        cp -P "$(cc -print-file-name=libcjson.so)"* $to/lib/ && rm -rf build/deps && mv $to build/deps ||
        die "error: cJSON, xxHash and make could not be copied to build/deps, see above"
    echo "build/deps holds cJSON, xxHash and make: carry it to a machine that lacks them"
fi

# The libraries that programs for aarch64 use, unpacked, so that the system's packages stay of one architecture. Debian's mirrors have
# them, Ubuntu's have not.
if want --aarch64 && [ ! -d build/aarch64 ]; then
    to=$PWD/build/aarch64.tmp
    arm() { apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State::Lists="$to/lists" -o Dir::Cache="$to" \
        -o Dir::State::status=/dev/null -o Debug::NoLocking=1 -o Acquire::Retries=3 "$@"; }
    mpi=$(dpkg-query -S '*/libmpi.so.*' 2>/dev/null | sed 's/:.*//; q')
    rm -rf "$to" && mkdir -p "$to/lists/partial" "$to/archives/partial"
    said=$({ arm update; arm install -y --download-only --no-install-recommends libdnnl-dev libcjson-dev libcmocka-dev libgomp1 $mpi &&
        for package in "$to"/archives/*.deb; do dpkg-deb -x "$package" "$to/root" || exit; done; } 2>&1) ||
        die "$said" "error: no libraries of aarch64; without them everything works but the test that runs programs for it"
    mv "$to/root" build/aarch64 && rm -rf "$to"
fi

# pypi OPTION MODULE PACKAGES REASON: from PyPI into build/venv, which sees the system's numpy
pypi() {
    python=build/venv/bin/python
    want "$1" && ! $python -c "import $2" 2>/dev/null || return 0
    echo "installing $2 from PyPI into build/venv, for $4"
    said=$({
        "$(scripts/find_python.sh)" -m venv --system-site-packages build/venv &&
            $python -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 20 $3
    } 2>&1) || die "$said" "error: no $2; without it everything works but $4"
}
pypi --bpe tiktoken "numpy tiktoken==0.14.0" "the GPT-2 encoding of data/prepare.py"
pypi --mutants universalmutator universalmutator==1.14.1 tests/mutants.py
pypi --torch torch torch==2.15.0 "the comparison with PyTorch"
exit 0
