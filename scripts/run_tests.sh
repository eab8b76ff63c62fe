#!/usr/bin/env bash
# Runs the tests, set-up included: ./scripts/run_tests.sh [pytest arguments]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

export TITAN_EXTRAS=dev
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh

# one thread: multi-process tests share the cores, and sums come out the same on every machine
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "$PYTHON" -m pytest -q "$@"
