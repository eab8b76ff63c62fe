#!/usr/bin/env bash
# Evaluates a model with lm_eval (the lm-evaluation-harness). From any folder:
#   scripts/evaluate.sh CKPT TASKS [lm_eval arguments]
#
# CKPT   an HF folder, or what checkpoint_tools/dcp_to_hf.py takes, such as RUN/checkpoint/step-500. That is exported to
#        CKPT-hf first, which is kept: the next evaluation, vLLM and transformers read the same folder.
# TASKS  what lm_eval --tasks takes: names with commas between; or a file or a folder of YAML tasks of your own, which
#        are read without network, and in which paths of data files count from their folder.
#
# All else goes to lm_eval: --limit 100, --batch_size 16, --apply_chat_template for a chat model, --model_args
# dtype=float32. Results and lm_eval's log are kept in CKPT-eval, or in --output_path.
# Exit codes: 0 done; 1 the export or lm_eval failed; 2 the arguments or the checkpoint are wrong.
set -euo pipefail

REPO=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

say() { printf 'evaluate: %s\n' "$*" >&2; }

refuse() {
  say "ERROR $*"
  exit 2
}

# Splits what comes behind CKPT and TASKS into `results`, `model_args` and `arguments`, lm_eval's own.
parse_arguments() {
  results=$checkpoint-eval
  model_args=""
  arguments=()
  while [ $# -gt 0 ]; do
    case $1 in
      --output_path=*) results=${1#*=} ;;
      -o | --output_path)
        [ $# -gt 1 ] || refuse "$1 needs a folder"
        results=$2
        shift
        ;;
      --model_args=*) model_args+=,${1#*=} ;;
      -a | --model_args)
        while [ $# -gt 1 ] && [[ $2 != -* ]]; do # lm_eval takes commas and blanks between them
          model_args+=,$2
          shift
        done
        ;;
      *) arguments+=("$1") ;;
    esac
    shift
  done
}

absolute() {
  case $1 in /*) printf '%s\n' "$1" ;; *) printf '%s\n' "$PWD/$1" ;; esac
}

# Prints the HF folder of the checkpoint; makes it if it is not there. It appears whole, or not at all.
hf_folder() {
  local made_of=$checkpoint export=$checkpoint-hf
  if [ ! -e "$checkpoint/.metadata" ] && [ -e "$checkpoint/config.json" ] &&
    compgen -G "$(printf %q "$checkpoint")/model*.safetensors*" >/dev/null; then
    printf '%s\n' "$checkpoint"
    return
  fi
  if [ -e "$checkpoint/adapter_config.json" ] || grep -qs '^ "lora": {' "$checkpoint/manifest.json"; then
    refuse "$checkpoint: is a LoRA adapter; merge it first: python checkpoint_tools/merge_lora.py --help"
  fi
  [ ! -d "$checkpoint" ] || made_of=$checkpoint/.metadata
  if [ -e "$export/config.json" ]; then
    [ ! "$made_of" -nt "$export/config.json" ] || refuse "$export is older than $checkpoint; remove it"
    say "using the export $export"
  else
    "$PYTHON" "$REPO/checkpoint_tools/dcp_to_hf.py" --input_dir "$checkpoint" --output_dir "$export" >&2 || return $?
  fi
  printf '%s\n' "$export"
}

# Adds to `model_args` the prompts that the model was trained with, unless the arguments say otherwise.
follow_training() {
  local value
  [[ " ${arguments[*]+"${arguments[*]}"} " == *" --apply_chat_template"* ]] || return 0
  [[ $model_args != *enable_thinking* ]] || return 0
  [[ $(cat "$1/titan_mi100.json" 2>/dev/null) =~ \"enable_thinking\":\ (true|false) ]] || return 0
  value=${BASH_REMATCH[1]}
  say "enable_thinking = $value, as the model was trained (titan_mi100.json); --model_args enable_thinking=... overrides"
  [ "$value" = true ] && model_args+=,enable_thinking=True || model_args+=,enable_thinking=False
}

main() {
  local checkpoint tasks results model_args arguments model log folder="" status=0
  case " $* " in
    *" -h "* | *" --help "*)
      sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
      return 0
      ;;
  esac
  [ $# -ge 2 ] && [[ $1 != -* && $2 != -* ]] || refuse "name a checkpoint and tasks; --help says how"
  checkpoint=$(absolute "${1%/}")
  tasks=$2
  shift 2
  parse_arguments "$@"
  results=$(absolute "$results")
  case $checkpoint in *,*) refuse "$checkpoint: lm_eval takes no path with a comma; rename it, or link to it" ;; esac
  # shellcheck source=scripts/setup_env.sh
  TITAN_EXTRAS="eval" source "$REPO/scripts/setup_env.sh"
  export PYTHONSAFEPATH=1 TOKENIZERS_PARALLELISM=false

  if [[ $tasks == *.yaml ]] || { [ -d "$tasks" ] && compgen -G "$(printf %q "$tasks")/*.yaml" >/dev/null; }; then
    [ -e "$tasks" ] || refuse "$tasks: no such file"
    tasks=$(absolute "${tasks%/}")
    folder=$tasks
    [ -d "$tasks" ] || folder=$(dirname -- "$tasks")
    arguments=(--include_path "$folder" ${arguments[@]+"${arguments[@]}"})
    export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
  fi
  model=$(hf_folder) || exit $?
  follow_training "$model"
  [ -z "$folder" ] || cd -- "$folder"
  mkdir -p "$results" || refuse "$results: cannot be made; name another --output_path"
  log=$results/lm_eval.log
  "$PYTHON" -m lm_eval --model hf --model_args "pretrained=$model$model_args" --tasks "$tasks" \
    --output_path "$results" ${arguments[@]+"${arguments[@]}"} 2>&1 | tee "$log" || status=$?
  if [ "$status" -eq 0 ]; then
    say "results: $results"
  elif grep -q 'Tasks not found' "$log"; then
    refuse "$(grep -o 'Tasks not found.*' "$log" | tail -n 1); python -m lm_eval ls tasks lists them"
  else
    say "ERROR lm_eval failed with exit code $status; all it said: $log"
    return $((status == 2 ? 2 : 1))
  fi
}

main "$@"; exit
