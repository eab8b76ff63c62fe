#!/usr/bin/env bash
# Evaluates a checkpoint with lm_eval, a task of the array for each benchmark, on one GPU each:
#   sbatch [sbatch options] scripts/slurm/evaluate.sh CKPT [lm_eval arguments]
# Export the checkpoint before (checkpoint_tools/dcp_to_hf.py), or the tasks of the array wait for one another's export.
# Data sets come from the hub: fetch them on a login node, or set https_proxy where compute nodes have one.
# Results: CKPT-eval/TASK. On Frontier add -A PROJECT, and -t 2:00:00.
#SBATCH --job-name=titan-eval
#SBATCH --output=%x-%A-%a.log
#SBATCH --array=0-8
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --time=2:00:00
set -uo pipefail

# task of lm_eval, and examples in its prompt: use those of the table you compare with
BENCHMARKS=(
  "mmlu 5" "mmlu_pro 5" "arc_challenge 25" "gsm8k 5" "agieval_en 3" "drop 3" "bbh 3" "winogrande 5" "hellaswag 10"
)

TITAN_REPO=${TITAN_REPO:-${SLURM_SUBMIT_DIR:-}}
if [ $# -eq 0 ] || [ "${SLURM_ARRAY_TASK_ID:-x}" = x ] || ! [ -e "$TITAN_REPO/scripts/evaluate.sh" ]; then
  echo "ERROR from the checkout, or with TITAN_REPO set: sbatch scripts/slurm/evaluate.sh CKPT [lm_eval arguments]" >&2
  exit 2
fi
if [ "$SLURM_ARRAY_TASK_ID" -ge "${#BENCHMARKS[@]}" ]; then
  echo "ERROR --array: there are ${#BENCHMARKS[@]} benchmarks, from 0" >&2
  exit 2
fi
read -r task shots <<<"${BENCHMARKS[$SLURM_ARRAY_TASK_ID]}"
checkpoint=$1
shift
srun --ntasks=1 "$TITAN_REPO/scripts/evaluate.sh" "$checkpoint" "$task" --num_fewshot "$shots" \
  --output_path "${checkpoint%/}-eval/$task" "$@"
