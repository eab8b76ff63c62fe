#!/usr/bin/env bash
# Trains. From any folder:
#   ./run_train.sh [--nproc_per_node N] [--job.config_file X.toml] [--section.key value ...]
# N defaults to NGPU, or the GPUs present, or 2 on CPU. Without a config file it trains train_configs/debug.toml.
# --help lists every key. Exit codes: 0 done; 1 crash; 2 config or input; 3 preempted, saved; 4 numerical abort; 5 hang.
set -euo pipefail

REPO=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

say() { printf 'run_train: %s\n' "$*" >&2; }

# Splits the command line into `processes` and `arguments`, the trainer's own.
parse_arguments() {
  local has_config=""
  processes=${NGPU:-}
  arguments=()
  wants_help=""
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) wants_help=1 ;;
      --nproc_per_node=* | --nproc-per-node=*) processes=${1#*=} ;;
      --nproc_per_node | --nproc-per-node)
        [ $# -gt 1 ] || { say "$1 needs a number, e.g. --nproc_per_node 2" && exit 2; }
        processes=$2
        shift
        ;;
      --job.config_file | --job.config_file=*) has_config=1 && arguments+=("$1") ;;
      *) arguments+=("$1") ;;
    esac
    shift
  done
  # ${a[@]+...}: an empty array is an unset variable to bash before 4.4
  [ -n "$has_config" ] ||
    arguments=(--job.config_file "$REPO/train_configs/debug.toml" ${arguments[@]+"${arguments[@]}"})
}

count_processes() {
  [ -n "$processes" ] || processes=$("$PYTHON" -m titan_mi100.hardware)
  [[ $processes =~ ^[1-9][0-9]*$ ]] ||
    { say "the number of processes must be 1 or more, not '$processes' (--nproc_per_node, NGPU)" && exit 2; }
}

set_defaults() {
  local cores
  # the processes share the cores; torchrun's own default is one thread each, and a paragraph of warning
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
  # peer access over PCIe between MI100s needs it
  [ ! -e /dev/kfd ] || export HSA_FORCE_FINE_GRAIN_PCIE=${HSA_FORCE_FINE_GRAIN_PCIE:-1}
}

# Starts torchrun and returns its exit status. A signal to this script reaches the workers through torchrun, which
# passes it on and waits; a second one ends everything at once.
launch() {
  local status=0 signals=0
  set -m # a process group of its own: Ctrl-C must arrive once, through the trap, not from the terminal as well
  TITAN_LAUNCH_ID=$launch_id "$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 \
    --nproc_per_node "$processes" -m titan_mi100.train "${arguments[@]}" --job.run_folder "$run_folder" </dev/null &
  torchrun=$!
  set +m
  trap 'forward INT' INT
  trap 'forward TERM' TERM HUP
  while :; do
    status=0
    wait "$torchrun" || status=$?
    kill -0 "$torchrun" 2>/dev/null || break # a trapped signal ends `wait` early
  done
  [ "$status" -eq 0 ] || kill_stragglers
  return "$status"
}

forward() {
  signals=$((signals + 1))
  if [ "$signals" -eq 1 ]; then
    say "stopping (once more ends it at once) ..."
    kill -s "$1" "$torchrun" 2>/dev/null || true
  else
    kill -s KILL "$torchrun" 2>/dev/null || true
  fi
}

# Workers live in sessions of their own, so when torchrun was killed no process group holds them; their environment
# names the launch.
kill_stragglers() {
  local entry
  for entry in $(grep -lzsx "TITAN_LAUNCH_ID=$launch_id" /proc/[0-9]*/environ 2>/dev/null || true); do
    entry=${entry#/proc/}
    kill -s KILL "${entry%/environ}" 2>/dev/null || true
  done
}

# Prints the exit code that this launch left in the run folder, or 1 if it left none (an earlier launch's does not
# count), and in further lines why.
read_outcome() {
  "$PYTHON" - "$run_folder/run_state.json" "$launch_id" <<'PY' || echo 1
import json, sys

try:
    with open(sys.argv[1], encoding="utf-8") as file:
        state = json.load(file)
except (OSError, ValueError):
    state = {}
ours = isinstance(state, dict) and state.get("launch_id") == sys.argv[2]
print((ours and state.get("exit_code")) or 1)
print(state.get("message", "") if ours else "")
PY
}

# torchrun has just printed a page about its workers, so what the run itself said last comes again.
report_failure() {
  local code=$1 message=$2 meaning
  case $code in
    2) meaning="the config or the input is wrong" ;;
    3) meaning="stopped early and saved; the same command with --job.run_folder '$run_folder' goes on" ;;
    4) meaning="stopped because of the numbers (loss or gradients)" ;;
    5) meaning="a process hung" ;;
    *) meaning="did not finish" ;;
  esac
  if [ -n "$message" ]; then
    printf '%s\n' "$message" | while IFS= read -r line; do say "$line"; done
  fi
  say "exit code $code: $meaning. Run folder: $run_folder"
}

main() {
  local processes arguments wants_help run_folder launch_id torchrun outcome code
  parse_arguments "$@"
  # shellcheck source=scripts/setup_env.sh
  source "$REPO/scripts/setup_env.sh"
  # the caller's folder may hold another titan_mi100; only the installed one is meant (Python 3.11 and later heed this)
  export PYTHONSAFEPATH=1
  [ -z "$wants_help" ] || exec "$PYTHON" -m titan_mi100.config --help
  count_processes
  # checked once, without torch, before any process starts; prints the folder, so that all processes share it
  run_folder=$(WORLD_SIZE=$processes "$PYTHON" -m titan_mi100.config "${arguments[@]}") || exit $?
  set_defaults
  # also without torch: bad rows end here, before a GPU is touched, and the processes find the data ready
  "$PYTHON" -m titan_mi100.data.prepare "${arguments[@]}" --job.run_folder "$run_folder" || exit $?
  launch_id=$(date +%s)-$$-$RANDOM
  if launch; then
    return 0
  fi
  outcome=$(read_outcome)
  code=${outcome%%$'\n'*}
  report_failure "$code" "$(printf '%s' "${outcome#"$code"}" | sed '/^$/d')"
  return "$code"
}

main "$@"; exit # on one line: bash reads a script as it goes, and this file may change during a long run
