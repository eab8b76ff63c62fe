#!/usr/bin/env bash
# Builds flash attention for MI250X (gfx90a) as a wheel on a login node. First activate the environment for it:
#   scripts/slurm/build_flash_attention.sh FOLDER
#   pip install FOLDER/flash_attn-*.whl
# It builds the Composable Kernel backend; FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE builds the Triton backend. The branch
# is the one on OLCF's page "PyTorch on Frontier" (2026). Never run by us. titan_mi100 does not need it: it has its own
# Triton kernel, and the attention trial at the start of a run finds the backends that work.
set -euo pipefail

if [ $# -ne 1 ] || [[ $1 = -* ]]; then
  sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
branch=${FLASH_ATTENTION_VERSION:-v2.8.4.1-cktile}
mkdir -p "$1"
wheels=$(cd -- "$1" && pwd -P)

if command -v module >/dev/null; then
  module load PrgEnv-gnu "${TITAN_ROCM_MODULE:-rocm/7.1.1}" craype-accel-amd-gfx90a
fi
python3 -c 'import sys, torch; torch.version.hip or sys.exit("ERROR this torch is not built for ROCm")'
python3 -m pip install ninja packaging wheel

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
git clone --depth 1 --branch "$branch" --recurse-submodules --shallow-submodules \
  https://github.com/ROCm/flash-attention "$build/flash-attention"
cd "$build/flash-attention"
# Build for one architecture: a login node has no GPU to detect, and building for all takes hours. (The variable's name
# is not verified.)
export GPU_ARCHS=gfx90a MAX_JOBS=${MAX_JOBS:-16}
export FLASH_ATTENTION_TRITON_AMD_ENABLE=${FLASH_ATTENTION_TRITON_AMD_ENABLE:-FALSE}
python3 setup.py bdist_wheel --dist-dir "$wheels"
ls "$wheels"
