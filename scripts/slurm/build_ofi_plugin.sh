#!/usr/bin/env bash
# Builds the OFI plugin on a login node of Frontier. With it RCCL uses libfabric (Slingshot):
#   scripts/slurm/build_ofi_plugin.sh FOLDER
# Use it only if the module rccl-net-plugin does not work; the guide recommends the module. Afterwards, in the shell
# that calls sbatch:
#   export NCCL_NET_PLUGIN=FOLDER/lib/librccl-net.so
# Versions and options are from OLCF's page "PyTorch on Frontier" (2026). Never run by us.
set -euo pipefail

if [ $# -ne 1 ] || [[ $1 = -* ]]; then
  sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
version=${OFI_PLUGIN_VERSION:-1.19.2}
libfabric=${LIBFABRIC:-/opt/cray/libfabric/2.3.1}
name=aws-ofi-nccl-$version
mkdir -p "$1"
prefix=$(cd -- "$1" && pwd -P)

module load PrgEnv-gnu "${TITAN_ROCM_MODULE:-rocm/7.1.1}" craype-accel-amd-gfx90a gcc-native/14.2
if ! [ -d "$libfabric" ]; then
  echo "ERROR $libfabric: no such folder; name another one of /opt/cray/libfabric: LIBFABRIC=..." >&2
  exit 2
fi

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cd "$build"
curl --fail --location --silent --show-error --output plugin.tar.gz \
  "https://github.com/aws/aws-ofi-nccl/releases/download/v$version/$name.tar.gz"
tar -xzf plugin.tar.gz
cd "$name"
CC=gcc ./configure --prefix="$prefix" --with-libfabric="$libfabric" --with-rocm="$ROCM_PATH"
make -j 8
make install
ln -sf librccl-net.so "$prefix/lib/libnccl-net.so" # some versions of RCCL look for this name
echo "export NCCL_NET_PLUGIN=$prefix/lib/librccl-net.so"
