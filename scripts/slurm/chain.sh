#!/usr/bin/env bash
# Submits N jobs of one run. Each job starts when the previous one has ended, with or without success:
#   scripts/slurm/chain.sh N [sbatch options] scripts/slurm/frontier.sh RUN_FOLDER [trainer's arguments]
# For queues in which a job may not requeue itself, or loses its priority when it does. If the run is done, or has
# failed with an error that would repeat, the remaining jobs end at once with the run's exit code.
set -euo pipefail

if [ $# -lt 3 ] || ! [[ $1 =~ ^[1-9][0-9]{0,2}$ ]]; then
  sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
count=$1 job=""
shift
for ((number = 1; number <= count; number++)); do
  job=$(TITAN_MAX_REQUEUES=0 TITAN_CHAINED=${job:+1} sbatch --parsable ${job:+--dependency=afterany:"$job"} "$@")
  job=${job%%;*} # with several clusters sbatch prints "job;cluster"
  printf 'job %d of %d: %s\n' "$number" "$count" "$job"
done
