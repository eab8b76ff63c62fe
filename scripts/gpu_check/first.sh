#!/usr/bin/env bash
# The GPU check's first part, at most 10 minutes: bash scripts/gpu_check/first.sh [--help]
# Results go to $OUT (default: outputs/gpu_check). PYTHON names another interpreter.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
python=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
PYTHONPATH=$root:$root/scripts${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m gpu_check.run first "$@"
