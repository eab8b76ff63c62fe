#!/usr/bin/env bash
# Makes the tables of docs/PERFORMANCE.md that need a GPU, one process on one card:
#   scripts/bench/gpu.sh [TABLES.md] [PYTHON]
# PYTHON is an interpreter that has trl and datasets beside this package, for the tables against TRL. A part that fails
# says so in the file, and the others go on; the exit code is then 1.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." || exit

tables=${1:-gpu_tables.md} python=${2:-python3} failed=0
python3 -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu.sh: torch finds no GPU here")' || exit 2
: >"$tables" || exit 2

# A heading, the command, and what it prints.
part() {
  local title=$1
  shift
  # shellcheck disable=SC2016 # backticks of Markdown
  printf '\n## %s\n`%s`\n\n' "$title" "$*" | tee -a "$tables"
  if ! "$@" 2>>"$tables.log" | tee -a "$tables"; then
    printf 'FAILED: see %s.log\n' "$tables" | tee -a "$tables"
    failed=1
  fi
}

{
  date -u +%F
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || rocm-smi --showproductname --showdriverversion
} | tee -a "$tables"
for seq in 1024 4096 16384; do # unmasked rows, and documents of GSM8K's mean length
  part "Attention, $seq" python3 scripts/bench/attention.py --seq "$seq" --document 0 200 --batch $((16384 / seq))
done
part "A step" python3 scripts/bench/step.py --model 0.6B 1.7B 4B --batch 8 --dtype bfloat16 --checkpointing selective \
  --accumulation 2 --warmup 3 --steps 10 --profile
part "A step, compiled" python3 scripts/bench/step.py --model 0.6B 1.7B --batch 8 --dtype bfloat16 --checkpointing \
  selective --accumulation 2 --warmup 3 --steps 10 --compile
part "Against TRL" python3 scripts/bench/versus.py --model 0.6B 1.7B --batch 8 --dtype bfloat16 --rounds 10 --python "$python"
part "Against TRL, 4B" python3 scripts/bench/versus.py --model 4B --batch 8 --dtype bfloat16 --rounds 10 --apart \
  --python "$python"
exit "$failed"
