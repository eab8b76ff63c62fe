#!/usr/bin/env bash
# Evaluates a model with lm_eval: scripts/evaluate.sh CKPT TASKS [lm_eval arguments]. From any folder; --help explains.
#
# This script finds or creates the Python environment; titan_mi100/workshop/harness.py does the rest.
set -euo pipefail

REPO=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

main() {
  case " $* " in
    *" -h "* | *" --help "*) # prints the docstring of harness.py, which needs no environment
      sed -n '1s/^"""//;/^"""$/q;p' "$REPO/titan_mi100/workshop/harness.py"
      return 0
      ;;
  esac
  # shellcheck source=scripts/setup_env.sh
  TITAN_EXTRAS="eval" source "$REPO/scripts/setup_env.sh"
  # Do not import a titan_mi100 from the current folder, only the installed one (needs Python 3.11 or later).
  PYTHONSAFEPATH=1 exec "$PYTHON" -m titan_mi100.workshop.harness "$@"
}

main "$@"; exit # on one line: bash reads a script while it runs, and this file may change meanwhile
