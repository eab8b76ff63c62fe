#!/usr/bin/env bash
# A training job on Frontier (OLCF): MI250X, 8 GCDs and 4 Slingshot NICs a node. From the checkout:
#   sbatch -A PROJECT -N 66 -t 24:00:00 -p extended --export=ALL,TITAN_NODES=64 scripts/slurm/frontier.sh \
#     RUN_FOLDER --job.config_file X.toml [--section.key value ...]
# RUN_FOLDER must be on Orion (Lustre). The example has two spare nodes, which replace nodes that do not answer.
# Never run on Frontier by us. Sources of the settings, as of 2026: [P] OLCF's page "PyTorch on Frontier", [S] its page
# "Sbcast Conda Environments", [H] HPE's application note on RCCL over Slingshot (shs-ccl-docs).
#SBATCH --job-name=titan
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Keep the job when a node fails, so that a start can use a spare node. A run that has trained ends and is requeued.
#SBATCH --no-kill
# the node-local NVMe at /mnt/bb/$USER [S]
#SBATCH -C nvme
# selects the alternative rendezvous protocol, which is better on many nodes; also needs FI_CXI_RDZV_PROTO below [P, H]
#SBATCH --network=disable_rdzv_get
# signal ten minutes before the time limit: the last step and the final save must fit into this time
#SBATCH --signal=B:USR1@600
set -uo pipefail

TITAN_REPO=${TITAN_REPO:-${SLURM_SUBMIT_DIR:-}}
if [ -z "${SLURM_JOB_ID:-}" ]; then
  echo "ERROR not a SLURM job; submit it: sbatch -A PROJECT -N 66 -t 24:00:00 $0 RUN_FOLDER --job.config_file X.toml" >&2
  exit 2
fi
if ! [ -e "$TITAN_REPO/scripts/slurm/job.sh" ]; then
  echo "ERROR $TITAN_REPO is not the checkout of titan_mi100; submit from there, or set TITAN_REPO" >&2
  exit 2
fi
# shellcheck source=scripts/slurm/job.sh
source "$TITAN_REPO/scripts/slurm/job.sh"

# The modules of the guide [P]; the environment must have been created with the same ones.
if command -v module >/dev/null; then
  module load PrgEnv-gnu "${TITAN_ROCM_MODULE:-rocm/7.1.1}" craype-accel-amd-gfx90a
  # RCCL over libfabric; without it RCCL uses TCP sockets, which do not scale to large jobs [P]
  [ -n "${NCCL_NET_PLUGIN:-}" ] || module load rccl-net-plugin
  export LD_LIBRARY_PATH=${CRAY_LD_LIBRARY_PATH:-}:${LD_LIBRARY_PATH:-} # for modules that are not the default ones [P]
fi

# Nodes have four interfaces, hsn0 to hsn3. The guide uses all four for RCCL's own connections, and hsn0 alone if jobs
# hang [P]; above about 300 nodes hsn0 alone was needed (users' report). If the plugin works, hsn0 carries no tensors.
export NCCL_SOCKET_IFNAME=hsn0
export GLOO_SOCKET_IFNAME=hsn0 # gloo would take the first interface it finds (users' report)
export TITAN_SHOW_ADDRESS='hostname -i | cut -d" " -f1' # of a node, for the rendezvous [P]

# RCCL [P, H]
export NCCL_CROSS_NIC=1       # rings and trees may change the NIC between nodes: faster on large systems [H]
export NCCL_NET_GDR_LEVEL=PHB # NICs read and write the GPUs' memory; needed for RDMA between GPUs [H]
# Fail if the plugin does not load; otherwise RCCL would use slow TCP. On one node the plugin is never loaded [P].
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  export NCCL_NET=${NCCL_NET:-OFI} # name of the plugin 1.19; before: "AWS Libfabric" [P, H]
fi

# libfabric's provider for Slingshot (cxi) [P, H]
export HSA_FORCE_FINE_GRAIN_PCIE=1      # peer access to memory behind large BARs
export FI_MR_CACHE_MONITOR=kdreg2       # userfaultfd is safe too; memhooks can deadlock with the plugin [P]
export FI_CXI_DISABLE_HOST_REGISTER=1   # calls into ROCm by the provider may deadlock RCCL [H]
export FI_CXI_DEFAULT_CQ_SIZE=131072    # completion queues: larger for large jobs [H]
export FI_CXI_DEFAULT_TX_SIZE=2048      # as many sends under way; for large jobs with unexpected messages [H]
export FI_CXI_RX_MATCH_MODE=hybrid      # go on in software when the NIC's matching entries are used up [H]
export FI_CXI_RDZV_PROTO=alt_read       # see --network above
export FI_CXI_RDZV_EAGER_SIZE=0         # send no data before the receiver is ready [H]
export FI_CXI_RDZV_GET_MIN=0            # goes with alt_read [H]
export FI_CXI_RDZV_THRESHOLD=0          # every message by rendezvous [P]; reason not verified

# One GCD per task, with seven cores of its own L3 region [P] (the eighth is reserved for the system: not verified).
# `closest` binds each GCD to its nearest cores. torchrun cannot do this: in the guide's test its processes shared one
# core [P]. The plugin then uses the NIC that is nearest to the GCD (not verified).
export TITAN_TASKS=8
TITAN_SRUN=(--cpus-per-task=7 --gpus-per-task=1 --gpu-bind=closest)
export OMP_NUM_THREADS=7

# The environment is packed once (conda-pack) and copied to the NVMe of each node. On 8 nodes, a small script that
# imports torch took 2 s from the NVMe, 51 s from Orion and 236 s from NFS; unpacking took 49 s [S].
#   TITAN_ENV=$MEMBERWORK/PROJECT/env.tar.gz
export TITAN_LOCAL=${TITAN_LOCAL:-/mnt/bb/$USER/titan-$SLURM_JOB_ID}

titan_job "$@"
exit $?
