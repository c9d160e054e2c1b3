#!/usr/bin/env bash
# Where the CUDA toolkit, cuBLAS, cuDNN and NCCL are. Looked for, in this order, each by itself:
#   1. CUDA_HOME, CUDNN_HOME, NCCL_HOME       2. the toolkit that holds nvcc (on PATH, or /usr/local/cuda)
#   3. the distribution's own directories     4. Python wheels (nvidia-cudnn-cu13, nvidia-nccl-cu13, …)
#
#   find_cuda.sh make      variables for make, in its syntax; none where something is missing
#   find_cuda.sh report    what was found, and the command that installs what was not
set -uo pipefail

nvcc_found() {
    local at
    for at in "${CUDA_HOME:-/nonexistent}/bin/nvcc" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
        [ -x "$at" ] && { echo "$at"; return; }
    done
}

NVCC=$(nvcc_found)
TOOLKIT=${NVCC:+$(dirname "$(dirname "$(readlink -f "$NVCC")")")}

wheels() { # site-packages/nvidia of the Python that is there
    local python
    for python in "${PYTHON:-python3}" python3; do
        "$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"] + "/nvidia")' 2>/dev/null && return
    done
}

# Directories that may hold include/ and lib/ of a library whose HOME is given.
places() {
    echo "$1" "$TOOLKIT" "$TOOLKIT/targets/x86_64-linux" "$TOOLKIT/targets/sbsa-linux" /usr /usr/local
}
wheel_places() { # of the library NAME
    [ -n "${WHEELS=$(wheels)}" ] && echo "$WHEELS/$1" "$WHEELS/cu13" "$WHEELS/cu12"
}

# find_file FILE SUBDIRECTORIES DIRECTORIES...: the first directory with that file
find_file() {
    local file=$1 subdirectories=$2 place sub
    shift 2
    for place in "$@"; do
        for sub in $subdirectories; do
            [ -n "$place" ] && compgen -G "$place/$sub/$file" >/dev/null && { echo "$place/$sub"; return; }
        done
    done
}

LIBRARY_DIRECTORIES="lib64 lib lib/x86_64-linux-gnu lib/aarch64-linux-gnu"
# look FILE SUBDIRECTORIES NAME HOME
look() {
    local found
    found=$(find_file "$1" "$2" $(places "$4"))
    echo "${found:-$(find_file "$1" "$2" $(wheel_places "$3"))}"
}
include_of() { look "$1" include "$2" "$3"; }
library_of() { look "$1" "$LIBRARY_DIRECTORIES" "$2" "$3"; }

# link_of DIRECTORY NAME: wheels hold libX.so.9 without the link libX.so that -lX needs, and nvcc takes no such file.
link_of() {
    local directory=$1 name=$2 file
    [ -e "$directory/lib$name.so" ] && { echo "-L$directory -l$name -Xlinker -rpath=$directory"; return; }
    file=$(compgen -G "$directory/lib$name.so.*" | head -1)
    [ -n "$file" ] && echo "-L$directory -Xlinker -l:$(basename "$file") -Xlinker -rpath=$directory"
}

locate() {
    cublas_include=$(include_of cublasLt.h cublas "${CUDA_HOME:-}")
    cublas_library=$(library_of 'libcublasLt.so*' cublas "${CUDA_HOME:-}")
    cudnn_include=$(include_of cudnn.h cudnn "${CUDNN_HOME:-}")
    cudnn_library=$(library_of 'libcudnn.so*' cudnn "${CUDNN_HOME:-}")
    nccl_include=$(include_of nccl.h nccl "${NCCL_HOME:-}")
    nccl_library=$(library_of 'libnccl.so*' nccl "${NCCL_HOME:-}")
}

complete() {
    [ -n "$NVCC" ] && [ -n "$cublas_include" ] && [ -n "$cublas_library" ] && [ -n "$cudnn_include" ] &&
        [ -n "$cudnn_library" ] && [ -n "$nccl_include" ] && [ -n "$nccl_library" ]
}

cflags() {
    local directory
    for directory in $(printf '%s\n' "$cublas_include" "$cudnn_include" "$nccl_include" | sort -u); do
        case $directory in /usr/include) ;; *) echo "-isystem $directory" ;; esac
    done
}

# Code for the GPU of this machine; without one, for what most people have, and PTX for what is to come.
arch() {
    local capability
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d '. ')
    case $capability in
    90 | 100 | 103 | 120) echo "-gencode arch=compute_${capability}a,code=sm_${capability}a" ;;
    [0-9]*) echo "-gencode arch=compute_$capability,code=sm_$capability" ;;
    *) echo "-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a" \
        "-gencode arch=compute_80,code=compute_80" ;;
    esac
}

# line NAME VERSION WHERE HOW: one row of the report
line() {
    if [ -n "$3" ]; then
        printf '%-12s %s  %s\n' "$1" "$3" "$2"
    else
        printf '%-12s missing: %s\n' "$1" "$4"
    fi
}

version_of() { # HEADER PREFIX: MAJOR.MINOR.PATCH from its #defines
    [ -r "$1" ] || return 0
    awk -v p="$2" '$1 == "#define" && ($2 == p "MAJOR" || $2 == p "MINOR" || $2 ~ "^" p "PATCH") && $3 ~ /^[0-9]+$/ {
        v = v (v == "" ? "" : ".") $3 } END { print v }' "$1"
}

report() {
    local release=""
    [ -n "$NVCC" ] && release=$("$NVCC" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    line nvcc "$release" "$NVCC" "install the CUDA toolkit (https://developer.nvidia.com/cuda-downloads), or set CUDA_HOME"
    line cuBLASLt "" "${cublas_include:+${cublas_library}}" "apt install libcublas-dev-13-0, or set CUDA_HOME"
    line cuDNN "$(version_of "${cudnn_include:-}/cudnn_version.h" CUDNN_)" "${cudnn_include:+${cudnn_library}}" \
        "apt install libcudnn9-dev-cuda-13, or: pip install nvidia-cudnn-cu13, or set CUDNN_HOME"
    line NCCL "$(version_of "${nccl_include:-}/nccl.h" NCCL_)" "${nccl_include:+${nccl_library}}" \
        "apt install libnccl-dev, or: pip install nvidia-nccl-cu13, or set NCCL_HOME"
    line GPU "" "$(nvidia-smi -L 2>/dev/null | head -1)" "no GPU here: programs are built for sm_80 and sm_90a"
}

for_make() {
    echo "\$(eval NVCC := $NVCC)\$(eval CUDA_INCLUDES := $(echo $(cflags)))"
    echo "\$(eval CUDA_LIBS := $(link_of "$cublas_library" cublasLt) $(link_of "$cudnn_library" cudnn)" \
        "$(link_of "$nccl_library" nccl))\$(eval CUDA_ARCH := $(echo $(arch)))"
}

locate
case ${1:-report} in
make) complete && for_make ;;
report) report ;;
*) echo "find_cuda.sh: unknown question $1; see the top of the file" >&2 && exit 2 ;;
esac
exit 0
