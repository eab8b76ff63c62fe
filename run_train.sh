#!/usr/bin/env bash
# Trains. From any folder:
#   ./run_train.sh [--nproc_per_node N] [--job.config_file X.toml] [--section.key value ...]
# N defaults to NGPU, or the GPUs present, or 2 on CPU. Without a config file it trains train_configs/debug.toml, or where
# a model or data are named, as train_configs/finetune.toml says.
# --help lists every key. Exit codes: 0 done; 1 crash; 2 config or input; 3 preempted, saved; 4 numerical abort; 5 hang.
set -euo pipefail

REPO=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

say() { printf 'run_train: %s\n' "$*" >&2; }

# Splits the command line into `processes` and `arguments`, the trainer's own.
parse_arguments() {
  processes=${NGPU:-}
  arguments=() # ${a[@]+...} below: an empty array is an unset variable to bash before 4.4
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
      *) arguments+=("$1") ;;
    esac
    shift
  done
}

count_processes() {
  [ -n "$processes" ] || processes=$("$PYTHON" -m titan_mi100.config.hardware)
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

# Starts torchrun and returns its exit status; nothing of it is left.
launch() {
  local status=0
  run_interruptibly tell_workers env TITAN_OUTCOME="$outcome" TITAN_LAUNCHER_PID=$$ "$PYTHON" -m torch.distributed.run \
    --standalone --local-addr 127.0.0.1 --nproc_per_node "$processes" \
    -m titan_mi100.train ${arguments[@]+"${arguments[@]}"} \
    --job.run_folder "$run_folder" || status=$?
  [ "$status" -eq 0 ] || signal_processes KILL
  return "$status"
}

# Runs a command and returns its exit status; signals to this script are passed on by the function that is named first,
# and it waits on.
run_interruptibly() {
  local status
  how=$1
  shift
  set -m # a process group of its own: Ctrl-C must arrive once, through the trap, not from the terminal as well
  # USR1 is ignored until somebody listens to it: a worker that has just begun would die, and the others wait for it
  (trap '' USR1 && exec "$@") </dev/null &
  running=$!
  set +m
  [ -z "$told" ] || pass_on
  while :; do
    status=0
    wait "$running" || status=$?
    kill -0 "$running" 2>/dev/null || break # a trapped signal ends `wait` early
  done
  running=""
  return "$status"
}

# A first signal is passed on. Ctrl-C after it ends everything at once; others are often sent twice, and must not.
on_signal() {
  if [ -z "$told" ]; then
    told=$1
    say "stopping (Ctrl-C ends it at once) ..."
    pass_on
  elif [ "$1" = INT ]; then
    kill -s KILL "$running" 2>/dev/null || true
  fi
}

pass_on() {
  [ -z "$running" ] || "$how" # else between two commands
}

tell() {
  kill -s "${told/USR1/TERM}" "$running" 2>/dev/null || true
}

# Ctrl-C ends the run, through torchrun. TERM, HUP and USR1 go to the workers alone, which save and stop: torchrun would
# give them half a minute for that. Again and again, for some may not listen yet.
tell_workers() {
  if [ "$told" = INT ]; then
    tell
  else
    while kill -0 "$running" && signal_processes USR1 "$running" && sleep 2; do :; done >/dev/null 2>&1 &
  fi
}

# Sends a signal to this launch's processes, which are in sessions of their own: their environment names the launch. With
# a parent's number only to its children: what a worker itself has started may not know the signal.
signal_processes() {
  local entry status
  for entry in $(grep -lzsx "TITAN_OUTCOME=$outcome" /proc/[0-9]*/environ 2>/dev/null || true); do
    entry=${entry#/proc/}
    entry=${entry%/environ}
    read -r status 2>/dev/null <"/proc/$entry/stat" || continue
    status=${status##*) } # state, parent, ...
    [ -n "${2:-}" ] && [ "$(cut -d' ' -f2 <<<"$status")" != "$2" ] || kill -s "$1" "$entry" 2>/dev/null || true
  done
}

# Prints the exit code that the run left, or 1 if it left none (3 if it was told to stop before it began) or says that it
# is done but torchrun does not, and in further lines why.
read_outcome() {
  "$PYTHON" - "$outcome" "$told" "$1" <<'PY' || echo 1
import json, sys

try:
    with open(sys.argv[1], encoding="utf-8") as file:
        state = json.load(file)
except (OSError, ValueError):
    state = {}
if not state and sys.argv[2] not in ("", "INT"):
    state = {"exit_code": 3, "message": f"{sys.argv[2]}: stopped before the run began; nothing was trained"}
code = state.get("exit_code", 1)
print(1 if code == 0 and sys.argv[3] != "0" else code)
print(state.get("message", ""))
PY
}

report_failure() {
  local code=$1 message=$2 meaning
  case $code in
    2) meaning="the config or the input is wrong" ;;
    3) meaning="stopped early and saved; with --job.run_folder '$run_folder' and without --checkpoint.fresh it goes on" ;;
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
  local processes arguments wants_help run_folder outcome running="" how="" told="" ended code status message
  parse_arguments "$@"
  # shellcheck source=scripts/setup_env.sh
  source "$REPO/scripts/setup_env.sh"
  # the caller's folder may hold another titan_mi100; only the installed one is meant (Python 3.11 and later heed this)
  export PYTHONSAFEPATH=1
  [ -z "$wants_help" ] || exec "$PYTHON" -m titan_mi100.config.load --help
  count_processes
  # checked once, without torch, before any process starts; prints the folder, so that all processes share it
  run_folder=$(WORLD_SIZE=$processes "$PYTHON" -m titan_mi100.config.load ${arguments[@]+"${arguments[@]}"}) || exit $?
  set_defaults
  outcome=$(mktemp)
  rm -f "$outcome" # the run makes it
  trap "rm -f '$outcome'" EXIT # expanded now: it runs when this function is over
  trap 'on_signal INT' INT
  trap 'on_signal TERM' TERM HUP
  trap 'on_signal USR1' USR1
  # also without torch: bad rows end here, before a GPU is touched, and the processes find the data ready
  status=0
  run_interruptibly tell "$PYTHON" -m titan_mi100.data.prepare ${arguments[@]+"${arguments[@]}"} --job.run_folder "$run_folder" || status=$?
  if [ "$status" -ne 0 ] && [ -z "$told" ]; then
    return "$status"
  fi
  [ -n "$told" ] || launch || status=$?
  ended=$(read_outcome "$status")
  code=${ended%%$'\n'*}
  # where torchrun has just printed a page about its workers, what the run itself said last comes again
  message=$([ "$status" -eq 0 ] || printf '%s' "${ended#"$code"}" | sed '/^$/d')
  [ "$code" -eq 0 ] || report_failure "$code" "$message"
  return "$code"
}

main "$@"; exit # on one line: bash reads a script as it goes, and this file may change during a long run
