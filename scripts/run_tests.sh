#!/usr/bin/env bash
# Creates the environment if needed and runs the tests: ./scripts/run_tests.sh [--full] [pytest arguments]
# --full adds the complete matrices (every layout, resume, fuzzed input ...), which take several times as long.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

export TITAN_EXTRAS=dev
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh

# One thread: multi-process tests share the cores, and sums have the same rounding on every machine.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONDONTWRITEBYTECODE=  # or each of hundreds of processes compiles the package again
# Each worker runs full test files, because many fixtures are created once per file. conftest.py orders the files.
exec "$PYTHON" -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations=10 "$@"
