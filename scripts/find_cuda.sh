#!/usr/bin/env bash
# Find the CUDA toolkit, cuBLAS, cuDNN and NCCL. Each is searched separately, in this order, header and library together, for a
# program that is compiled with one version and runs with another is slower, or wrong:
#   1. CUDA_HOME, CUDNN_HOME, NCCL_HOME       2. the toolkit that holds nvcc (on PATH, or /usr/local/cuda)
#   3. the distribution's directories         4. Python wheels (nvidia-cudnn-cu13, nvidia-nccl-cu13, …)
#
#   find_cuda.sh make      print variables in make's syntax; nothing if a part is missing
#   find_cuda.sh report    print what was found, and how to install missing parts
set -uo pipefail

for NVCC in "${CUDA_HOME:-/nonexistent}/bin/nvcc" "$(command -v nvcc)" /usr/local/cuda/bin/nvcc ""; do
    [ -x "$NVCC" ] && break
done
TOOLKIT=/nonexistent wheels=/nonexistent
if [ -n "$NVCC" ]; then
    TOOLKIT=$(dirname "$(dirname "$(readlink -f "$NVCC")")")
    wheels=$("${PYTHON:-python3}" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/nvidia
fi

# first_with FILE DIRECTORIES...: the first directory that has the file
first_with() {
    local file=$1 directory
    shift
    for directory in "$@"; do
        compgen -G "$directory/$file" >/dev/null && { echo "$directory"; return; }
    done
}

names="cudnn nccl cublasLt" # the toolkit's headers last: it may hold another version of the others
declare -A home=([cublasLt]=${CUDA_HOME:-} [cudnn]=${CUDNN_HOME:-} [nccl]=${NCCL_HOME:-}) include library # directories
complete=$NVCC
for name in $names; do
    for place in "${home[$name]:-/nonexistent}" "$TOOLKIT" "$TOOLKIT"/targets/{x86_64,sbsa}-linux /usr /usr/local \
        "$wheels/${name%Lt}" "$wheels"/cu1{3,2}; do
        include[$name]=$(first_with "$name.h" "$place/include")
        library[$name]=$(first_with "lib$name.so*" "$place"/{lib64,lib,lib/{x86_64,aarch64}-linux-gnu})
        [ -n "${include[$name]}" ] && [ -n "${library[$name]}" ] && continue 2
    done
    include[$name]='' library[$name]='' complete=''
done

# link_of NAME: options to link a library. Wheels have libX.so.9 without the link libX.so that -lX needs, which nvcc rejects.
link_of() {
    local directory=${library[$1]} link=-l$1
    [ -e "$directory/lib$1.so" ] || link="-Xlinker -l:$(basename "$(compgen -G "$directory/lib$1.so.*" | head -1)")"
    echo "-L$directory $link -Xlinker -rpath=$directory"
}

# Options for the GPU of this machine; without one, for A100 and H100, and PTX for later GPUs.
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
    printf '%-12s %s\n' "$1" "$([ -n "$3" ] && echo "$3  $2" || echo "missing: $4")"
}

version_of() { # HEADER PREFIX: MAJOR.MINOR.PATCH from its #defines
    [ ! -r "$1" ] || awk -v p="$2" '$1 == "#define" && $2 ~ "^" p "(MAJOR|MINOR|PATCH(LEVEL)?)$" && $3 ~ /^[0-9]+$/ {
        v = v (v == "" ? "" : ".") $3 } END { print v }' "$1"
}

case ${1:-report} in
make)
    [ -n "$complete" ] || exit 0
    flags=$(printf '%s\n' "${include[@]}" | awk '!seen[$0]++' | sed '\|^/usr/include$|d; s/^/-isystem /')
    echo "\$(eval NVCC := $NVCC)\$(eval CUDA_INCLUDES := $(echo $flags))"
    echo "\$(eval CUDA_LIBS := $(for name in $names; do link_of $name; done | tr '\n' ' '))\$(eval CUDA_ARCH := $(arch))" ;;
report)
    line nvcc "$([ -z "$NVCC" ] || "$NVCC" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')" "$NVCC" \
        "install the CUDA toolkit (https://developer.nvidia.com/cuda-downloads), or set CUDA_HOME"
    line cuBLASLt "" "${include[cublasLt]:+${library[cublasLt]}}" "apt install libcublas-dev-13-0, or set CUDA_HOME"
    line cuDNN "$(version_of "${include[cudnn]}/cudnn_version.h" CUDNN_)" "${include[cudnn]:+${library[cudnn]}}" \
        "apt install libcudnn9-dev-cuda-13, or: pip install nvidia-cudnn-cu13, or set CUDNN_HOME"
    line NCCL "$(version_of "${include[nccl]}/nccl.h" NCCL_)" "${include[nccl]:+${library[nccl]}}" \
        "apt install libnccl-dev, or: pip install nvidia-nccl-cu13, or set NCCL_HOME"
    line GPU "" "$(nvidia-smi -L 2>/dev/null | head -1)" "no GPU here: programs are built for sm_80 and sm_90a" ;;
esac
