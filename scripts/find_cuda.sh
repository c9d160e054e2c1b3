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

# look FILE SUBDIRECTORIES WHEEL HOME
look() {
    local found packages
    found=$(find_file "$1" "$2" "$4" "$TOOLKIT" "$TOOLKIT/targets/x86_64-linux" "$TOOLKIT/targets/sbsa-linux" /usr /usr/local)
    [ -z "$found" ] && packages=$(wheels) && found=$(find_file "$1" "$2" "$packages/$3" "$packages/cu13" "$packages/cu12")
    echo "$found"
}

declare -A include library # of each library the directory
for name in cublasLt cudnn nccl; do
    case $name in cublasLt) home=${CUDA_HOME:-} ;; cudnn) home=${CUDNN_HOME:-} ;; nccl) home=${NCCL_HOME:-} ;; esac
    include[$name]=$(look "$name.h" include "${name%Lt}" "$home")
    library[$name]=$(look "lib$name.so*" "lib64 lib lib/x86_64-linux-gnu lib/aarch64-linux-gnu" "${name%Lt}" "$home")
done

# link_of DIRECTORY NAME: wheels hold libX.so.9 without the link libX.so that -lX needs, and nvcc takes no such file.
link_of() {
    local directory=$1 name=$2 file
    [ -e "$directory/lib$name.so" ] && { echo "-L$directory -l$name -Xlinker -rpath=$directory"; return; }
    file=$(compgen -G "$directory/lib$name.so.*" | head -1)
    [ -n "$file" ] && echo "-L$directory -Xlinker -l:$(basename "$file") -Xlinker -rpath=$directory"
}

complete() {
    local name
    for name in "${!include[@]}"; do
        [ -n "$NVCC" ] && [ -n "${include[$name]}" ] && [ -n "${library[$name]}" ] || return 1
    done
}

cflags() {
    printf '%s\n' "${include[@]}" | sort -u | sed '\|^/usr/include$|d; s/^/-isystem /'
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
    line cuBLASLt "" "${include[cublasLt]:+${library[cublasLt]}}" "apt install libcublas-dev-13-0, or set CUDA_HOME"
    line cuDNN "$(version_of "${include[cudnn]}/cudnn_version.h" CUDNN_)" "${include[cudnn]:+${library[cudnn]}}" \
        "apt install libcudnn9-dev-cuda-13, or: pip install nvidia-cudnn-cu13, or set CUDNN_HOME"
    line NCCL "$(version_of "${include[nccl]}/nccl.h" NCCL_)" "${include[nccl]:+${library[nccl]}}" \
        "apt install libnccl-dev, or: pip install nvidia-nccl-cu13, or set NCCL_HOME"
    line GPU "" "$(nvidia-smi -L 2>/dev/null | head -1)" "no GPU here: programs are built for sm_80 and sm_90a"
}

for_make() {
    echo "\$(eval NVCC := $NVCC)\$(eval CUDA_INCLUDES := $(echo $(cflags)))"
    echo "\$(eval CUDA_LIBS := $(for name in cublasLt cudnn nccl; do link_of "${library[$name]}" $name; done | tr '\n' ' '))"
    echo "\$(eval CUDA_ARCH := $(echo $(arch)))"
}

case ${1:-report} in
make) complete && for_make ;;
report) report ;;
*) echo "find_cuda.sh: unknown question $1; see the top of the file" >&2 && exit 2 ;;
esac
exit 0
