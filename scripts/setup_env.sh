# shellcheck shell=bash
# Finds the Python environment, or makes it. Source it: `source scripts/setup_env.sh`.
#
# If the active `python3` has torch and this checkout (pip install -e .), it is used. Otherwise .venv is made once, and
# made complete again when it was interrupted or a pin changed. Afterwards PYTHON is the interpreter, first in PATH.
#
#   TITAN_EXTRAS   extras of pyproject.toml to install as well, e.g. dev
#   TITAN_VENV     folder of the environment to make; default .venv in the checkout
#   TITAN_PYTHON   interpreter to make it with; default: the first of python3, python3.13 ... with version >= 3.10
#   TITAN_TORCH    version of torch in it; default 2.8.0 (ROCm 6.4 build) on a ROCm machine, else 2.13.0
# Any of the last three means: that environment, whatever is active.

_titan_say() { printf 'setup: %s\n' "$*" >&2; }

# What an interpreter has, without importing it: its path, its prefix and a verdict, a line each.
_titan_probe_code='
import importlib.util, os, sys
checkout, wanted = os.path.realpath(sys.argv[1]), sys.argv[2:]
sys.path[:] = [entry for entry in sys.path if entry]  # the current directory is not an installation
print(sys.executable, sys.prefix, sep="\n")
package = importlib.util.find_spec("titan_mi100")
missing = [name for name in wanted if importlib.util.find_spec(name) is None]
if sys.version_info < (3, 10):
    print("missing Python >= 3.10")
elif "torch" in missing or package is None or not package.origin:
    print("no torch or no titan_mi100")
elif os.path.realpath(os.path.dirname(package.origin)) != os.path.join(checkout, "titan_mi100"):
    print("other", os.path.dirname(os.path.realpath(package.origin)))
elif missing:
    print("missing", *missing)
else:
    print("ok")
'

# Modules that prove that the extras are there.
_titan_modules() {
  case ",$1," in
    *,dev,*) printf 'torch\npytest\nhypothesis\nruff\nmypy\ntransformers\ntokenizers\npeft\n' ;;
    *,eval,*) printf 'torch\ntransformers\nlm_eval\n' ;;
    *) printf 'torch\n' ;;
  esac
}

# Sets PYTHON if the active environment will do. 0: it does; 1: it does not, make one; 2: the user must decide.
_titan_use_active() {
  local repo=$1 venv=$2 extras=$3 active found python prefix verdict
  active=$(command -v python3 || command -v python) || return 1
  # shellcheck disable=SC2046  # module names hold no blanks
  found=$("$active" -c "$_titan_probe_code" "$repo" $(_titan_modules "$extras") 2>/dev/null) || return 1
  { read -r python && read -r prefix && read -r verdict; } <<<"$found" || return 1
  # our own .venv, activated: its stamp says whether it is complete
  [ "$prefix" -ef "$venv" ] && [ -e "$venv/titan_setup.lock" ] && return 1
  case $verdict in
    ok) PYTHON=$python && return 0 ;;
    other*) _titan_say "not using $python: its titan_mi100 is another checkout, ${verdict#other }" ;;
    missing*)
      _titan_say "$python has torch and this checkout, but not: ${verdict#missing }"
      _titan_say "Install it: $python -m pip install -c $repo/constraints.txt -e '${repo}[$extras]'" \
        "- or deactivate this environment, and .venv is used."
      return 2
      ;;
  esac
  return 1
}

# Prints the path of the interpreter to make the environment with.
_titan_base_python() {
  local candidate
  if [ -n "${TITAN_PYTHON:-}" ]; then
    set -- "$TITAN_PYTHON"
  else
    set -- python3 python3.13 python3.12 python3.11 python3.10 python
  fi
  for candidate in "$@"; do
    # the answer is sys.executable, because a version manager's shim may answer differently in another folder
    "$candidate" -c 'import sys; sys.version_info >= (3, 10) or sys.exit(1); print(sys.executable)' 2>/dev/null &&
      return 0
  done
  _titan_say "no Python >= 3.10 found (tried: $*). Install one, or name it: TITAN_PYTHON=/path/to/python3.12"
  return 1
}

# Runs a command with its output in the log; shows the log's end when it fails.
_titan_logged() {
  local log=$1
  shift
  "$@" >>"$log" 2>&1 && return 0
  tail -n 12 "$log" >&2
  return 1
}

_titan_pip() {
  local venv=$1
  shift
  _titan_logged "$venv/titan_setup.log" "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" &&
    return 0
  _titan_say "pip could not install this: $*"
  if grep -qE 'NewConnectionError|name resolution|timed out|ProxyError|unreachable|from versions: none' \
    "$venv/titan_setup.log"; then
    _titan_say "It was not found at all: no network, or no build of it for this Python (TITAN_PYTHON names another)." \
      "Call again then; what is installed already is kept."
  fi
  _titan_say "pip's whole output: $venv/titan_setup.log"
  return 1
}

# Makes the bare environment. Debian's python3 comes without ensurepip, so there pip is put in by the outer pip.
_titan_make_venv() {
  local venv=$1 base=$2 log=$1/titan_setup.log
  # what an earlier attempt left, but not the lock, which marks the folder as ours
  find "$venv" -mindepth 1 -maxdepth 1 ! -name titan_setup.lock -exec rm -rf {} + || return 1
  if "$base" -c 'import ensurepip, venv' 2>/dev/null; then
    _titan_logged "$log" "$base" -m venv "$venv" && return 0
  else
    _titan_logged "$log" "$base" -m venv --without-pip "$venv" &&
      _titan_logged "$log" "$base" -m pip --python "$venv/bin/python" install --quiet pip && return 0
  fi
  _titan_say "$base cannot make a virtual environment. On Debian and Ubuntu: sudo apt install python3-venv"
  return 1
}

# What the environment must have been made from: place, torch, pins.
_titan_fingerprint() {
  local repo=$1 torch=$2
  { printf '%s\n' "$repo" "$torch" && cat "$repo/pyproject.toml" "$repo/constraints.txt"; } | cksum
}

# Whether the stamp, which is written last, says: complete, by these pins, with (at least) these extras.
_titan_is_complete() {
  local venv=$1 fingerprint=$2 extras=$3 made had
  [ -x "$venv/bin/python" ] && [ -f "$venv/titan_setup.stamp" ] || return 1
  { read -r made && read -r had; } <"$venv/titan_setup.stamp" || return 1
  [ "$made" = "$fingerprint" ] && { [ -z "$extras" ] || [[ ",$had," = *",$extras,"* ]]; } && _titan_right_python "$venv"
}

# Whether the environment was made with TITAN_PYTHON, or none is named.
_titan_right_python() {
  local id='import sys; print(sys.base_prefix, sys.version_info[:2])'
  [ -z "${TITAN_PYTHON:-}" ] || [ "$("$1/bin/python" -c "$id")" = "$("$TITAN_PYTHON" -c "$id")" ]
}

_titan_install() {
  local repo=$1 venv=$2 torch=$3 fingerprint=$4 extras=$5 base had=""
  _titan_is_complete "$venv" "$fingerprint" "$extras" && return 0 # another call did it while this one waited
  _titan_say "Setting up ${venv#"$repo"/} with torch ${torch%% *} (once; a few minutes) ..."
  if [ -f "$venv/titan_setup.stamp" ]; then
    had=$(sed -n 2p "$venv/titan_setup.stamp")
    rm -f "$venv/titan_setup.stamp"
  fi
  if [ -n "$had" ] && [[ ",$extras," != *",$had,"* ]]; then # keep what an earlier call asked for
    extras=$had${extras:+,$extras}
  fi
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 || ! _titan_right_python "$venv"; then
    base=$(_titan_base_python) && _titan_make_venv "$venv" "$base" || return 1
  fi
  : >"$venv/titan_setup.log"
  # shellcheck disable=SC2086  # $torch is a requirement and, on ROCm, an option with its value
  _titan_pip "$venv" torch==$torch || return 1
  _titan_pip "$venv" -c "$repo/constraints.txt" -e "${repo}${extras:+[$extras]}" || return 1
  printf '%s\n%s\n' "$fingerprint" "$extras" >"$venv/titan_setup.stamp.new" &&
    mv "$venv/titan_setup.stamp.new" "$venv/titan_setup.stamp" && _titan_say "done."
}

# One set-up of a folder at a time. The lock also marks the folder as ours: a user's own environment is left alone.
_titan_install_locked() {
  local venv=$2 lock=$2/titan_setup.lock
  if [ -e "$venv" ] && [ ! -e "$lock" ] && [ -n "$(ls -A "$venv")" ]; then
    _titan_say "$venv was not made by this script, so it is left alone. Activate it, with torch and this checkout" \
      "in it (pip install -e .), or remove it, or name another folder: TITAN_VENV=/path/to/folder"
    return 1
  fi
  mkdir -p "$venv" || return 1
  (
    if command -v flock >/dev/null; then
      flock -n 9 || { _titan_say "waiting for another set-up of $venv ..." && flock 9; } || exit 1
    fi
    _titan_install "$@"
  ) 9>>"$lock"
}

_titan_setup() {
  local repo venv fingerprint torch extras=${TITAN_EXTRAS:-} status=1
  repo=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P) || return 1
  venv=${TITAN_VENV:-$repo/.venv}
  case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
  if [ -z "${TITAN_VENV:-}${TITAN_PYTHON:-}${TITAN_TORCH:-}" ]; then
    _titan_use_active "$repo" "$venv" "$extras" && status=0 || status=$?
    [ "$status" -ne 2 ] || return 1
  fi
  if [ "$status" -ne 0 ]; then
    if [ -e /dev/kfd ] || [ -d /opt/rocm ]; then
      torch="${TITAN_TORCH:-2.8.0} --index-url https://download.pytorch.org/whl/rocm6.4"
    else
      torch=${TITAN_TORCH:-2.13.0}
    fi
    fingerprint=$(_titan_fingerprint "$repo" "$torch") || return 1
    _titan_is_complete "$venv" "$fingerprint" "$extras" ||
      _titan_install_locked "$repo" "$venv" "$torch" "$fingerprint" "$extras" || return 1
    PYTHON=$venv/bin/python
  fi
  PATH=$(dirname -- "$PYTHON"):$PATH
  export PYTHON PATH
}

_titan_setup
