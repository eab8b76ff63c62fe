#!/usr/bin/env bash
# Trains. From any folder:
#   ./run_train.sh [--nproc_per_node N] [--job.config_file X.toml] [--section.key value ...]
# N defaults to NGPU, or the number of GPUs, or 1 on a CPU. Without a config file it uses train_configs/debug.toml, or
# train_configs/finetune.toml if the command names a model or data.
# --help explains. Exit codes: 0 done; 1 crash; 2 config or input; 3 preempted, saved; 4 numerical abort; 5 hang.
#
# This script finds or creates the Python environment; titan_mi100/launch/launcher.py does the rest.

# This comes first: it handles a stop signal that arrives before the launcher listens.
trap 'echo "run_train: stopped before the run began; nothing was trained; exit code 3" >&2 || :; exit 3' \
  INT TERM HUP USR1
trap : USR2 # asks for stacks; there are none yet
set -euo pipefail

REPO=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

main() {
  # shellcheck source=scripts/setup_env.sh
  source "$REPO/scripts/setup_env.sh"
  # Do not import a titan_mi100 from the current folder, only the installed one (needs Python 3.11 or later).
  export PYTHONSAFEPATH=1
  set -- "$PYTHON" -m titan_mi100.launch.launcher "$@"
  # Block signals until the launcher reads them. An `env` without this option leaves a gap while Python starts.
  if env --block-signal=TERM true 2>/dev/null; then
    set -- env --block-signal=INT,TERM,HUP,USR1,USR2 "$@"
  fi
  exec "$@"
}

main "$@"; exit # on one line: bash reads a script while it runs, and this file may change meanwhile
