#!/usr/bin/env bash
# Trains. From any folder:
#   ./run_train.sh [--nproc_per_node N] [--job.config_file X.toml] [--section.key value ...]
# or on each of several nodes (docs/CLUSTER.md):
#   ./run_train.sh --nnodes NODES --node_rank RANK --rdzv FIRST_HOST:PORT ...
# N defaults to NGPU, or the GPUs present, or 2 on CPU. Without a config file it trains train_configs/debug.toml, or where
# a model or data are named, as train_configs/finetune.toml says.
# --help lists every key. Exit codes: 0 done; 1 crash; 2 config or input; 3 preempted, saved; 4 numerical abort; 5 hang.
#
# Finds or makes the environment; titan_mi100/launch.py does the rest.

# first of all: told to stop before the launcher listens
trap 'echo "run_train: stopped before the run began; nothing was trained; exit code 3" >&2 || :; exit 3' \
  INT TERM HUP USR1
set -euo pipefail

REPO=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

main() {
  # shellcheck source=scripts/setup_env.sh
  source "$REPO/scripts/setup_env.sh"
  # the caller's folder may hold another titan_mi100; only the installed one is meant (Python 3.11 and later heed this)
  export PYTHONSAFEPATH=1
  set -- "$PYTHON" -m titan_mi100.launch "$@"
  # signals wait until the launcher listens; an `env` that cannot do this leaves a gap while Python starts
  if env --block-signal=TERM true 2>/dev/null; then
    set -- env --block-signal=INT,TERM,HUP,USR1 "$@"
  fi
  exec "$@"
}

main "$@"; exit # on one line: bash reads a script as it goes, and this file may change meanwhile
