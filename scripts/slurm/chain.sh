#!/usr/bin/env bash
# Submits N jobs of one run, each of which begins when the one before has ended, however it ended:
#   scripts/slurm/chain.sh N [sbatch options] scripts/slurm/frontier.sh RUN_FOLDER [trainer's arguments]
# For queues in which a job may not requeue itself, or loses its age when it does. A job that finds the run done, or
# ended by something that would happen again, ends at once with the run's exit code.
set -euo pipefail

if [ $# -lt 3 ] || ! [[ $1 =~ ^[1-9][0-9]{0,2}$ ]]; then
  sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
count=$1 job=""
shift
for ((number = 1; number <= count; number++)); do
  job=$(TITAN_MAX_REQUEUES=0 TITAN_CHAINED=${job:+1} sbatch --parsable ${job:+--dependency=afterany:"$job"} "$@")
  job=${job%%;*} # of several clusters, its name follows
  printf 'job %d of %d: %s\n' "$number" "$count" "$job"
done
