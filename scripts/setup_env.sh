# shellcheck shell=bash
# Finds or creates the Python environment. Source it: `source scripts/setup_env.sh`.
#
# The active `python3` is used if it has torch and this checkout (pip install -e .). Otherwise .venv is created once.
# It is completed if an earlier set-up was interrupted or a pinned version has changed. Afterwards the variable PYTHON
# names the interpreter, and its folder is first in PATH.
#
#   TITAN_EXTRAS   extras of pyproject.toml to install too, e.g. dev
#   TITAN_VENV     folder of the environment to create; default .venv in the checkout
#   TITAN_PYTHON   interpreter to create it with; default: the first of python3, python3.13 ... with version >= 3.10
#   TITAN_TORCH    version of torch to install; default: the one that fits cards and driver (docs/DOCTOR.md)
#   TITAN_TORCH_INDEX   address of the package index that has this torch, in place of the one that fits the cards; set,
#                  but empty: the index that pip is configured for, PyPI if none is
# If TITAN_VENV, TITAN_PYTHON or TITAN_TORCH is set, the active python3 is not used.

_titan_say() { printf 'setup: %s\n' "$*" >&2; }

# Prints three lines about an interpreter: its path, its prefix and a verdict on its packages. Imports none of them.
_titan_probe='
import importlib.util, os, sys
checkout, extras = os.path.realpath(sys.argv[1]), sys.argv[2].split(",")
sys.path[:] = [entry for entry in sys.path if entry]  # the current directory is not an installation
wanted = {
    "always": "jinja2 numpy safetensors sentencepiece tensorboard tiktoken tokenizers torchdata tqdm",
    "dev": "pytest xdist hypothesis ruff mypy transformers peft pyarrow zstandard",
    "eval": "transformers lm_eval",
}
names = [name for extra in ["always", *extras] for name in wanted.get(extra, "").split()]
missing = [name for name in names if importlib.util.find_spec(name) is None]
package = importlib.util.find_spec("titan_mi100")
folder = os.path.dirname(os.path.realpath(package.origin)) if package and package.origin else ""
if sys.version_info < (3, 10) or not folder or importlib.util.find_spec("torch") is None:
    verdict = "none"
elif folder != os.path.join(checkout, "titan_mi100"):
    verdict = f"other {folder}"
else:
    verdict = " ".join(["missing", *missing]) if missing else "ok"
print(sys.executable, sys.prefix, verdict, sep="\n")
'

# Prints the path of the interpreter to create the environment with. It prints sys.executable, because the shim of a
# version manager can select another interpreter in another folder.
_titan_base_python() {
  local candidate code='import sys; sys.version_info >= (3, 10) or sys.exit(1); print(sys.executable)'
  set -- python3 python3.13 python3.12 python3.11 python3.10 python
  [ -z "${TITAN_PYTHON:-}" ] || set -- "$TITAN_PYTHON"
  for candidate in "$@"; do
    "$candidate" -c "$code" 2>/dev/null && return 0
  done
  _titan_say "no Python >= 3.10 found (tried: $*). Install one, or set TITAN_PYTHON=/path/to/python3.12"
  return 1
}

# Succeeds if the environment was created with TITAN_PYTHON, or TITAN_PYTHON is not set.
_titan_right_python() {
  local id='import sys; print(sys.base_prefix, sys.version_info[:2])'
  [ -z "${TITAN_PYTHON:-}" ] || [ "$("$1/bin/python" -c "$id")" = "$("$TITAN_PYTHON" -c "$id")" ]
}

# Succeeds if the environment is complete: its stamp, which is written last, has the same inputs (folder, torch, pinned
# versions) and at least these extras.
_titan_is_complete() {
  local venv=$1 made=$2 extras=$3 stamp had
  { read -r stamp && read -r had; } 2>/dev/null <"$venv/titan_setup.stamp" && [ "$stamp" = "$made" ] &&
    { [ -z "$extras" ] || [[ ",$had," = *",$extras,"* ]]; } && _titan_right_python "$venv"
}

# Runs a command and writes its output to the log. If the command fails, prints the end of the log and the remedy.
_titan_logged() {
  local log=$1 remedy=$2
  shift 2
  "$@" >>"$log" 2>&1 && return 0
  tail -n 12 "$log" >&2
  _titan_say "$remedy"
  _titan_say "full output: $log"
  return 1
}

# Prints two lines: pip's arguments for the torch that fits cards and driver, and the same in words. docs/DOCTOR.md has
# the sources. NVIDIA's cards come first, because the AMD GPU beside them is mostly a processor's own: a desktop Ryzen's
# gfx1036 has /dev/kfd, too, and no build of torch (planning/hardware.py). $1 is the root of the file system.
_titan_torch() {
  local root=${1:-} version=2.13.0 build="" words="" extras="" file name value
  # A container can have a card whose number is not 0.
  if compgen -G "$root/dev/nvidia[0-9]*" >/dev/null || [ -e "$root/usr/lib/wsl/lib/libcuda.so.1" ]; then
    local known driver old="" new=""
    known=$(grep -oEm1 '[0-9]{3}\.[0-9.]+' "$root/proc/driver/nvidia/version" 2>/dev/null) || known=""
    driver=${known:-580}
    for file in "$root"/sys/bus/pci/drivers/nvidia/*/device; do # PCI device ids grow with the generations
      { read -r value <"$file"; } 2>/dev/null && [[ $value =~ ^0x[0-9a-f]{4}$ ]] || continue
      ((value >= 0x1e00)) || old="older than Turing, "
      ((value < 0x2900)) || new=Blackwell
    done
    # CUDA 13 needs driver 580 and has no code for cards older than Turing; CUDA 12.6 has none for Blackwell. 2.8.0 is the
    # release with CUDA 12.8 that is tested.
    if [ -n "$old" ] || [ "${driver%%.*}" -lt 580 ]; then
      build=cu126 && [ -z "$new" ] || build=cu128 version=2.8.0
      words="${old}driver ${known:-unknown}: CUDA 12.${build#cu12}'s build"
      [ "${driver%%.*}" -ge 525 ] || words+=", which needs driver 525"
    fi
    words="NVIDIA's cards${words:+ ($words)}"
  else
    local simds number arch cards="" inside="" rocm="" unknown=""
    for file in "$root"/sys/class/kfd/kfd/topology/nodes/*/properties; do
      simds=0 number=0
      while read -r name value; do
        case $name in simd_count) simds=$value ;; gfx_target_version) number=$value ;; esac
      done 2>/dev/null <"$file" || continue
      case $simds:$number in
        0:* | *:90002 | *:90009 | *:90012 | *:100103 | *:10030[3567]) ;;
        *:110003 | *:11050[0123]) inside+=" $number" ;; # a processor's own, used where there is no card
        *) cards+=" $number" ;;
      esac
    done
    if [ -z "$cards$inside" ] && [ ! -d "$root/opt/rocm" ]; then
      build=cpu words="the CPU (no card that it has code for)"
    else
      read -r rocm 2>/dev/null <"$root/opt/rocm/.info/version" || :
      build=rocm6.4 && [[ ! $rocm =~ ^([7-9]|[1-9][0-9])\. ]] || build=rocm7.2
      for number in ${cards:-$inside}; do
        printf -v arch 'gfx%d%x%x' $((number / 10000)) $((number / 100 % 100)) $((number % 100))
        case $arch in
          gfx000) continue ;; # an old kernel does not say
          gfx900 | gfx906 | gfx908 | gfx90a | gfx942 | gfx1030 | gfx110[012] | gfx120[01]) ;; # in both
          gfx950 | gfx1103 | gfx115[01]) [ "$build" = amd ] || build=rocm7.2 ;;
          gfx101[012] | gfx103[124] | gfx115[23]) build=amd ;; # an index with an extra for each architecture
          *)
            unknown+=" $arch"
            continue
            ;;
        esac
        [[ ,$extras, = *,device-$arch,* ]] || extras+=${extras:+,}device-$arch
      done
      words=${extras//device-/}${rocm:+${extras:+, }ROCm ${rocm%%-*}}
      words="AMD's cards${words:+ ($words)}"
      [ -z "$unknown" ] || [ -n "$extras" ] || build=cpu words="the CPU (no build has code for$unknown)"
      case $build in rocm6.4) version=2.8.0 extras="" ;; rocm7.2) extras="" ;; amd) version=2.12.0 ;; esac
    fi
  fi
  local index=${build:+https://download.pytorch.org/whl/$build}
  [ "$build" != amd ] || index=https://repo.amd.com/rocm/whl-multi-arch/
  index=${TITAN_TORCH_INDEX-$index} version=${TITAN_TORCH:-$version}
  printf 'torch%s==%s%s\n' "${extras:+[$extras]}" "$version" "${index:+ --index-url $index}"
  printf 'torch %s for %s from %s\n' "$version" "$words" "${index:-"pip's index"}"
}

# Creates or completes the environment. The lock file lets only one caller do so at a time, and it marks the folder as
# created by this script.
_titan_install() (
  local repo=$1 venv=$2 torch=$3 made=$4 extras=$5 words=$6 lock=$2/titan_setup.lock log=$2/titan_setup.log base had
  if [ -e "$venv" ] && [ ! -e "$lock" ] && [ -n "$(ls -A "$venv")" ]; then
    _titan_say "$venv was not created by this script, so it is not changed. Install torch and this checkout in it" \
      "(pip install -e .) and activate it, or remove it, or set TITAN_VENV=/path/to/folder"
    return 1
  fi
  mkdir -p "$venv" && exec 9>>"$lock" || return 1
  if command -v flock >/dev/null && ! flock -n 9; then
    _titan_say "waiting for another set-up of $venv ..." && flock 9
  fi
  ! _titan_is_complete "$venv" "$made" "$extras" || return 0 # another caller created it while this one waited
  _titan_say "Setting up ${venv#"$repo"/} (once; a few minutes): $words ..."
  had=$(sed -n 2p "$venv/titan_setup.stamp" 2>/dev/null)
  [[ -z $had || ",$extras," = *",$had,"* ]] || extras=$had${extras:+,$extras} # keep the extras of earlier calls
: >"$log"
  if ! { "$venv/bin/python" -m pip --version && _titan_right_python "$venv"; } >/dev/null 2>&1; then
    base=$(_titan_base_python) || return 1
    find "$venv" -mindepth 1 -maxdepth 1 ! -name 'titan_setup.*' -exec rm -rf {} + || return 1
    # Debian's python3 has no ensurepip, so venv cannot install pip. Then python3's own pip installs it.
    # shellcheck disable=SC2016 # the inner shell expands $1 and $2
    "$base" -m venv "$venv" >>"$log" 2>&1 ||
      _titan_logged "$log" "$base cannot make a virtual environment; on Debian and Ubuntu: sudo apt install python3-venv" \
        bash -c '"$1" -m venv --without-pip "$2" && "$1" -m pip --python "$2/bin/python" install -q pip' - "$base" "$venv" ||
      return 1
  fi
  set -- "$venv/bin/python" -m pip install --quiet --disable-pip-version-check
  local remedy="pip could not install this. If there was no network, call again later: installed packages are kept.
setup: If there is no build for this Python, set TITAN_PYTHON to another one."
  # To pip another build of the same version is the same, so the wrong one must go first, with its Triton.
  # It goes when the right one is here: without a network the environment stays as it is.
  had=$(cat "$venv/titan_setup.torch" 2>/dev/null) || had=$torch
  if [ "$had" != "$torch" ] && [[ $torch != */whl/cpu ]]; then
    # shellcheck disable=SC2086
    _titan_logged "$log" "the torch in ${venv#"$repo"/} is another one (${had%% *}) and stays. $remedy" \
      "${@:1:3}" download --quiet --no-deps -d "$venv/titan_setup.wheels" $torch || return 1
    rm -rf "$venv/titan_setup.wheels" # pip has it in its cache
  fi
  rm -f "$venv/titan_setup.stamp"
  [ "$had" = "$torch" ] || "${@:1:3}" uninstall -qy torch triton pytorch-triton-rocm triton-rocm >>"$log" 2>&1
  had=$torch
  # The CPU's wheel is installed without its dependencies, which the next call takes from pip's index. If PyTorch's does
  # not answer, so does torch: PyPI's has CUDA's packages on Linux, gigabytes that are not used.
  # shellcheck disable=SC2086  # $torch is a requirement and an option with its value
  if [[ $torch = */whl/cpu ]]; then
    "$@" --no-deps --retries 1 --timeout 15 $torch >>"$log" 2>&1 ||
      _titan_say "no torch from ${torch##* }, so it comes from pip's index (PyPI's is larger, and computes the same)"
    torch=${torch%% *}
  fi
  # shellcheck disable=SC2086
  _titan_logged "$log" "$remedy" "$@" $torch || return 1
  printf '%s\n' "$had" >"$venv/titan_setup.torch"
  _titan_logged "$log" "$remedy" "$@" -c "$repo/constraints.txt" -e "${repo}${extras:+[$extras]}" || return 1
  printf '%s\n%s\n' "$made" "$extras" >"$venv/titan_setup.new" && mv "$venv/titan_setup.new" "$venv/titan_setup.stamp" &&
    _titan_say "done."
)

_titan_setup() {
  local repo venv extras=${TITAN_EXTRAS:-} chosen="" active python prefix verdict torch words made
  repo=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P) || return 1
  venv=${TITAN_VENV:-$repo/.venv}
  [[ $venv = /* ]] || venv=$PWD/$venv
  # Skip the probe if the active environment is our own .venv: its stamp decides whether it is complete.
  if [ -z "${TITAN_VENV:-}${TITAN_PYTHON:-}${TITAN_TORCH:-}" ] && active=$(command -v python3 || command -v python) &&
    { read -r python && read -r prefix && read -r verdict; } < <("$active" -c "$_titan_probe" "$repo" "$extras" 2>/dev/null) &&
    ! { [ "$prefix" -ef "$venv" ] && [ -e "$venv/titan_setup.lock" ]; }; then
    case $verdict in
      ok) chosen=$python ;;
      other*) _titan_say "not using $python: its titan_mi100 is another checkout, ${verdict#other }" ;;
      missing*)
        _titan_say "$python has torch and this checkout, but not: ${verdict#missing }"
        _titan_say "Install it: $python -m pip install -c $repo/constraints.txt -e '${repo}${extras:+[$extras]}'" \
          "- or deactivate this environment to use .venv."
        return 1
        ;;
    esac
  fi
  if [ -z "$chosen" ]; then
    { read -r torch && read -r words; } < <(_titan_torch) || return 1
    # A login node, or a container without its cards: the torch that is there is that of the cards.
    [[ $torch != */whl/cpu ]] || read -r torch 2>/dev/null <"$venv/titan_setup.torch" || :
    made=$({ printf '%s\n' "$repo" "${torch#torch==}" && cat "$repo/pyproject.toml" "$repo/constraints.txt"; } | cksum) || return 1
    _titan_is_complete "$venv" "$made" "$extras" ||
      _titan_install "$repo" "$venv" "$torch" "$made" "$extras" "$words" || return 1
    chosen=$venv/bin/python
  fi
  PYTHON=$chosen PATH=$(dirname -- "$chosen"):$PATH
  export PYTHON PATH
}

_titan_setup
