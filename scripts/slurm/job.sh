# shellcheck shell=bash
# shellcheck disable=SC2016 # text in single quotes is expanded by the shell of each task
# The common part of generic.sh and frontier.sh: a training job in SLURM. They source this file, then call
#   titan_job RUN_FOLDER [trainer's arguments]
# One task per GPU, without torchrun. If a start fails before its first step, it is tried again, up to three times, as a
# new SLURM step with a new port, on the nodes that answer. A run that has trained is requeued if it was stopped or lost
# a process.
#
#   TITAN_NODES         nodes to train on; default: all allocated nodes. Allocate more to have spare nodes.
#   TITAN_TASKS         tasks per node, one per GPU
#   TITAN_SRUN          array: more options for srun, such as bindings
#   TITAN_LOCAL         folder on each node for copies and caches; default /tmp/titan-USER-JOB
#   TITAN_ENV           an environment packed by conda-pack or venv-pack (.tar.gz); it is copied to each node
#   TITAN_SHOW_ADDRESS  command that is run on the first node and prints its address; default: the node's name is used
#   TITAN_MAX_REQUEUES  how often a job may be requeued; default 20; 0 in a chain
# Exit codes are those of docs/DESIGN.md.

titan_say() { printf '%s titan: %s\n' "$(date +%T)" "$*" >&2; }

# Prints the given nodes that can start a process within two minutes.
titan_answering() {
  local answers node
  # -K0 --no-kill: a failed node must not end the tasks of the other nodes
  answers=$(timeout 120 srun -K0 --no-kill --wait=30 --nodelist="$(titan_list "$@")" --nodes=$# --ntasks-per-node=1 \
    bash -c 'echo "here $SLURMD_NODENAME"' 2>/dev/null) || :
  for node in "$@"; do
    grep -qx "here $node" <<<"$answers" && printf '%s\n' "$node"
  done
  return 0
}

titan_list() (
  IFS=,
  printf '%s' "$*"
)

# Runs a command once on each node that takes part, including the spare nodes.
titan_on_each() {
  srun --nodelist="$(titan_list "${titan_nodes[@]}")" --nodes="${#titan_nodes[@]}" --ntasks-per-node=1 "$@"
}

# Copies a file of the shared file system to every node, and unpacks it there.
titan_unpack_on_each() {
  local file=$1 folder=$2 copy=$TITAN_LOCAL/${1##*/}
  titan_on_each mkdir -p "$folder" || return 1
  # sbcast reads the file only once. But if one node of the allocation is down, it fails and leaves partial files.
  sbcast --preserve --force "$file" "$copy" || titan_on_each cp "$file" "$copy" || return 1
  titan_on_each tar --overwrite -xf "$copy" -C "$folder"
}

# Sets PYTHON, and puts code and caches on each node: thousands of tasks must not share one folder for compiled kernels
# and Python modules.
titan_set_up() {
  if [ -n "${TITAN_ENV:-}" ]; then
    titan_unpack_on_each "$TITAN_ENV" "$TITAN_LOCAL/env" || return 1
    PYTHON=$TITAN_LOCAL/env/bin/python
    export PATH=$TITAN_LOCAL/env/bin:$PATH
    titan_on_each bash -c '! [ -x "$1" ] || "$1"' - "$TITAN_LOCAL/env/bin/conda-unpack" || return 1
  else
    # shellcheck source=scripts/setup_env.sh
    source "$TITAN_REPO/scripts/setup_env.sh" || return 1
  fi
  # Copy the package, one megabyte: srun forwards its standard input to every task. -h: the configs behind a link are
  # copied as files, as the link's target is not there, and nodes that share the folder would unlink each other's.
  tar -c -h -C "$TITAN_REPO" --exclude=__pycache__ titan_mi100 |
    titan_on_each bash -c 'mkdir -p "$1" && tar --overwrite -xf - -C "$1"' - "$TITAN_LOCAL/code" || return 1
  export PYTHONPATH=$TITAN_LOCAL/code${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
  export TRITON_CACHE_DIR=$TITAN_LOCAL/triton TORCHINDUCTOR_CACHE_DIR=$TITAN_LOCAL/inductor
  export MIOPEN_USER_DB_PATH=$TITAN_LOCAL/miopen MIOPEN_CUSTOM_CACHE_DIR=$TITAN_LOCAL/miopen
  # Restore the kernels that an earlier job of this run has compiled.
  [ ! -e "$1/kernels.tar" ] || titan_unpack_on_each "$1/kernels.tar" "$TITAN_LOCAL" ||
    titan_say "kernels.tar cannot be copied: kernels are compiled again"
}

# Saves the kernels that the first node has compiled, for the next jobs of this run.
titan_keep_kernels() {
  [ ! -e "$1/kernels.tar" ] || return 0
  srun --nodes=1 --ntasks=1 --nodelist="$2" bash -c '
    cd "$1" && found=$(ls -d triton inductor miopen 2>/dev/null) && [ -n "$found" ] || exit 0
    tar -cf "$2/.kernels.tar" $found && mv "$2/.kernels.tar" "$2/kernels.tar"' - "$TITAN_LOCAL" "$1" ||
    titan_say "the compiled kernels could not be saved"
}

# Runs the trainer as one SLURM step, one task per GPU. Sets `step_code` to srun's exit code, the highest of its tasks.
titan_step() {
  local nodes=$1 folder=$2
  shift 2
  if [ -n "${TITAN_SHOW_ADDRESS:-}" ]; then
    MASTER_ADDR=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes%%,*}" bash -c "$TITAN_SHOW_ADDRESS") || MASTER_ADDR=""
    export MASTER_ADDR # empty: the trainer uses the node's name
  fi
  # -K: end all tasks when one fails; they would wait for it. `trap "" USR1`: until the trainer handles USR1, the signal
  # would kill it.
  TITAN_RUN_FOLDER=$folder srun -K --nodelist="$nodes" --nodes="$TITAN_NODES" --ntasks-per-node="$TITAN_TASKS" \
    ${TITAN_SRUN[@]+"${TITAN_SRUN[@]}"} bash -c 'trap "" USR1; exec "$@"' - \
    "$PYTHON" -m titan_mi100.train "$@" &
  step_pid=$!
  step_code=0
  while wait "$step_pid" || step_code=$?; kill -0 "$step_pid" 2>/dev/null; do step_code=0; done # signals end `wait`
  step_pid=""
}

# Handles a stop signal: from SLURM before the time limit (--signal), a preemption, or scancel. The tasks save and end
# with code 3.
titan_stop() {
  titan_stopping=1
  titan_say "received a stop signal"
  [ -z "$step_pid" ] || kill -USR1 "$step_pid"
}

titan_requeue() {
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "${TITAN_MAX_REQUEUES:-20}" ]; then
    titan_say "not requeued: TITAN_MAX_REQUEUES = ${TITAN_MAX_REQUEUES:-20}"
  # A requeue ends this turn of the job, with SIGTERM. scontrol ignores it: it must live to answer.
  elif (trap "" TERM USR1; exec scontrol requeue "$SLURM_JOB_ID"); then
    titan_say "requeued"
  else
    titan_say "the job cannot be requeued; to resume, submit it again"
  fi
}

titan_job() {
  local run_folder=${1:-} folder code=1 move="" words="" attempt nodes=() first="" end
  step_pid="" titan_stopping=""
  case $run_folder in "" | -*)
    titan_say "ERROR name a run folder on a file system that all nodes share: sbatch SCRIPT RUN_FOLDER [arguments]"
    return 2
    ;;
  esac
  shift
  case " $* " in *" --checkpoint.fresh"* | *" --checkpoint.load_step"*)
    titan_say "ERROR checkpoint.fresh and load_step would count again at every requeue; name a new run folder instead"
    return 2
    ;;
  esac
  TITAN_NODES=${TITAN_NODES:-$SLURM_JOB_NUM_NODES}
  TITAN_LOCAL=${TITAN_LOCAL:-/tmp/titan-$(id -un)-$SLURM_JOB_ID}
  trap titan_stop USR1 TERM
  # The trainer stops and saves before this time. Newer versions of SLURM set it. On older ones (22.05) a job that was
  # submitted inside of another job inherits that one's, so squeue is asked first. It says "N/A" where there is no limit.
  if end=$(squeue -h -j "$SLURM_JOB_ID" -o %e) && [ -n "$end" ] && end=$(date -d "$end" +%s 2>/dev/null); then
    SLURM_JOB_END_TIME=$end
  fi
  export SLURM_JOB_END_TIME
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  mapfile -t titan_nodes < <(titan_answering "${nodes[@]}")
  titan_say "${#titan_nodes[@]} of ${#nodes[@]} nodes answer; $TITAN_NODES are needed"
  if [ "${#titan_nodes[@]}" -lt "$TITAN_NODES" ]; then
    titan_requeue
    return 1
  fi
  titan_set_up "$run_folder" || { titan_say "ERROR the nodes cannot be set up" && return 1; }
  if [ -n "${TITAN_CHAINED:-}" ]; then # a job of a chain: is there anything left to do?
    read -r code move words < <("$PYTHON" -m titan_mi100.watch.outcome "$run_folder")
    if [ "$move" = end ] && [ -e "$run_folder/run_state.json" ]; then
      titan_say "the run has ended before, with exit code $code: $words"
      return "$code"
    fi
  fi
  # Check the config once, before the tasks start. This also chooses the run folder's name.
  set -- --job.run_folder "$run_folder" "$@"
  folder=$(RANK=0 WORLD_SIZE=$((TITAN_NODES * TITAN_TASKS)) MASTER_ADDR="" MASTER_PORT=0 \
    "$PYTHON" -m titan_mi100.config.load "$@") || return $?

  for attempt in 1 2 3 4; do
    if [ -n "$titan_stopping" ]; then # the stop signal came while the nodes were set up
      code=3 move=requeue
      break
    fi
    # later attempts: only the nodes that were set up and still answer
    [ "$attempt" = 1 ] || mapfile -t titan_nodes < <(titan_answering "${titan_nodes[@]}")
    if [ "${#titan_nodes[@]}" -lt "$TITAN_NODES" ]; then
      titan_say "${#titan_nodes[@]} nodes are left; $TITAN_NODES are needed"
      code=1 move=requeue
      break
    fi
    nodes=("${titan_nodes[@]:0:TITAN_NODES}")
    first=${nodes[0]}
    export TITAN_START=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$attempt
    titan_step "$(titan_list "${nodes[@]}")" "$folder" "$@"
    read -r code move words < <("$PYTHON" -m titan_mi100.watch.outcome "$folder" --start "$TITAN_START" --srun "$step_code")
    titan_say "attempt $attempt: exit code $code (srun: $step_code), $move; $words"
    [ "$move" = retry ] && [ -z "$titan_stopping" ] || break
  done
  if [ -n "$first" ] && { [ "$code" -eq 0 ] || [ "$code" -eq 3 ]; }; then
    titan_keep_kernels "$folder" "$first"
  fi
  if [ "$move" = requeue ] || { [ "$move" = retry ] && [ -n "$titan_stopping" ]; }; then
    titan_requeue
  fi
  return "$code"
}
