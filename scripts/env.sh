#!/usr/bin/env bash
# Runs a command in a Python environment that has what it needs:  scripts/env.sh user|dev COMMAND...
#
# An activated virtual environment with torch 2.11 to 2.15 is used as it is: packages it lacks are
# added, those it has stay. Otherwise .venv is made, with requirements.txt (and requirements-dev.txt
# for `dev`); TORCH=2.x chooses another torch, in an environment of its own. PIP_ARGS is given to
# pip, for instance PIP_ARGS="--index-url …" for a build of torch without CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."

requirements=(requirements.txt)
[ "$1" = dev ] && requirements+=(requirements-dev.txt)
shift

pip_install() {
  local quiet=-qq
  [ -t 2 ] && quiet=
  # shellcheck disable=SC2086  # PIP_ARGS holds several words
  "$bin/python" -m pip install $quiet --disable-pip-version-check ${PIP_ARGS:-} "$@" >&2
}

# As a condition, where `set -e` is off: what fails below ends the script by itself.
use_activated() {
  bin=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}/bin
  [ -x "$bin/python" ] && [ "$bin" != /bin ] || return 1
  local torch lacking
  torch=$("$bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null)
  [[ $torch =~ ^2\.1[1-5]\. && $torch. == "${TORCH:-2}".* ]] || return 1
  PYTHON="$bin/python" scripts/prerequisites.sh || exit 1
  lacking=$("$bin/python" scripts/lacking.py "${requirements[@]}") || exit 1
  # shellcheck disable=SC2086  # one word a package
  [ -z "$lacking" ] || pip_install $lacking || exit 1
}

make_own() {
  local file wanted default torch env=.venv
  default=$(sed -n 's/^torch==//p' requirements.txt)
  torch=${TORCH:-$default}
  [[ $default. == "$torch".* ]] || env=.venv-torch$torch
  [[ $torch == *.*.* ]] || torch="$torch.*"
  bin=$PWD/$env/bin
  scripts/prerequisites.sh
  if ! [ -x "$bin/python" ]; then
    echo "ringcomm: making a virtual environment in $env" >&2
    "${PYTHON:-python3}" -m venv "$env"
  fi
  for file in "${requirements[@]}"; do
    wanted=$( (echo "$torch"; cat "$file") | sha256sum)
    [ "$(cat "$env/.$file" 2>/dev/null)" = "$wanted" ] && continue
    echo "ringcomm: installing torch==$torch and $file into $env" >&2
    grep -v '^torch=' "$file" >"$env/without-torch.txt"
    # Python compiles what is imported, when it is: not all of torch here.
    pip_install --no-compile "torch==$torch" -r "$env/without-torch.txt"
    echo "$wanted" >"$env/.$file"
  done
}

mkdir -p build
exec 9>build/env.lock
flock 9
use_activated || make_own
exec 9>&-
export PATH="$bin:$PATH"
exec "$@"
