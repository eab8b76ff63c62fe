#!/usr/bin/env bash
# Evaluates a model with lm_eval: scripts/evaluate.sh CKPT TASKS [lm_eval arguments]. From any folder; --help explains.
#
# Finds or makes the environment; titan_mi100/harness.py does the rest.
set -euo pipefail

REPO=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

main() {
  case " $* " in
    *" -h "* | *" --help "*) # needs no environment: what stands at the top of harness.py
      sed -n '1s/^"""//;/^"""$/q;p' "$REPO/titan_mi100/harness.py"
      return 0
      ;;
  esac
  # shellcheck source=scripts/setup_env.sh
  TITAN_EXTRAS="eval" source "$REPO/scripts/setup_env.sh"
  # the caller's folder may hold another titan_mi100; only the installed one is meant (Python 3.11 and later heed this)
  PYTHONSAFEPATH=1 exec "$PYTHON" -m titan_mi100.harness "$@"
}

main "$@"; exit # on one line: bash reads a script as it goes, and this file may change meanwhile
