#!/usr/bin/env bash
# A training job on any SLURM cluster:
#   sbatch -N 4 --gpus-per-node=8 -t 24:00:00 scripts/slurm/generic.sh RUN_FOLDER --job.config_file X.toml [...]
# Submit it from the checkout, or set TITAN_REPO. job.sh beside this file lists the settings; docs/CLUSTER.md explains.
#SBATCH --job-name=titan
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --exclusive
# five minutes before the wall: the last step and the final save must fit in there
#SBATCH --signal=B:USR1@300
set -uo pipefail

TITAN_REPO=${TITAN_REPO:-$SLURM_SUBMIT_DIR}
if ! [ -e "$TITAN_REPO/scripts/slurm/job.sh" ]; then
  echo "ERROR $TITAN_REPO is not the checkout of titan_mi100; submit from there, or set TITAN_REPO" >&2
  exit 2
fi
# shellcheck source=scripts/slurm/job.sh
source "$TITAN_REPO/scripts/slurm/job.sh"

# a task for each GPU; without GPUs for each CPU
TITAN_TASKS=${TITAN_TASKS:-${SLURM_GPUS_ON_NODE:-${SLURM_CPUS_ON_NODE:-1}}}
cores=$((SLURM_CPUS_ON_NODE / TITAN_TASKS))
if [ "$cores" -eq 0 ]; then
  titan_say "ERROR $TITAN_TASKS tasks for the $SLURM_CPUS_ON_NODE CPUs of a node; lower TITAN_TASKS, or ask for more"
  exit 2
fi
TITAN_SRUN=(--cpus-per-task="$cores")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores}
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
  TITAN_SRUN+=(--gpus-per-task=1 --gpu-bind=closest) # each task sees one GPU, the one that is nearest to its cores
fi
# The network interface, where nodes have several and not all of them connect: TITAN_NIC=ib0
if [ -n "${TITAN_NIC:-}" ]; then
  export NCCL_SOCKET_IFNAME=$TITAN_NIC GLOO_SOCKET_IFNAME=$TITAN_NIC
fi

titan_job "$@"
exit $?
