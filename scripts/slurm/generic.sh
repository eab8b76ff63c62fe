#!/usr/bin/env bash
# A training job on any SLURM cluster:
#   sbatch -N 4 --gpus-per-node=8 -t 24:00:00 scripts/slurm/generic.sh RUN_FOLDER --job.config_file X.toml [...]
# Submit it from the checkout, or set TITAN_REPO. job.sh in this folder lists the settings; see also docs/CLUSTER.md.
#SBATCH --job-name=titan
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --exclusive
# signal five minutes before the time limit: the last step and the final save must fit into this time
#SBATCH --signal=B:USR1@300
set -uo pipefail

TITAN_REPO=${TITAN_REPO:-${SLURM_SUBMIT_DIR:-}}
if [ -z "${SLURM_JOB_ID:-}" ]; then
  echo "ERROR not a SLURM job; submit it: sbatch -N 4 -t 24:00:00 $0 RUN_FOLDER --job.config_file X.toml" >&2
  exit 2
fi
if ! [ -e "$TITAN_REPO/scripts/slurm/job.sh" ]; then
  echo "ERROR $TITAN_REPO is not the checkout of titan_mi100; submit from there, or set TITAN_REPO" >&2
  exit 2
fi
# shellcheck source=scripts/slurm/job.sh
source "$TITAN_REPO/scripts/slurm/job.sh"

# One task per GPU; without GPUs, one per CPU.
TITAN_TASKS=${TITAN_TASKS:-${SLURM_GPUS_ON_NODE:-${SLURM_CPUS_ON_NODE:-1}}}
cores=$((SLURM_CPUS_ON_NODE / TITAN_TASKS))
if [ "$cores" -eq 0 ]; then
  titan_say "ERROR $TITAN_TASKS tasks for the $SLURM_CPUS_ON_NODE CPUs of a node; lower TITAN_TASKS, or ask for more"
  exit 2
fi
TITAN_SRUN=(--cpus-per-task="$cores")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores}
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
  # Each task sees all GPUs of the node, and takes the one of its LOCAL_RANK. A task that sees one GPU alone
  # (--gpus-per-task) can be barred from the others by cgroups: NCCL then has no P2P and no IPC between them.
  TITAN_SRUN+=(--gpus-per-node="$SLURM_GPUS_ON_NODE" --gpu-bind=none)
fi
# If nodes have several network interfaces and not all of them connect the nodes, name one: TITAN_NIC=ib0
if [ -n "${TITAN_NIC:-}" ]; then
  export NCCL_SOCKET_IFNAME=$TITAN_NIC GLOO_SOCKET_IFNAME=$TITAN_NIC
fi

titan_job "$@"
exit $?
