#!/usr/bin/env bash
# Makes the environment in which examples/clients run, build/clients, and prints its Python. It sees
# the packages of the Python on PATH, torch and ringcomm among them, and has its own beside them.
#   scripts/clients.sh         of all clients but vLLM
#   scripts/clients.sh vllm    of vLLM, which would bring a torchvision made for another torch: so
#                              nothing comes that its requirements do not name
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:+-$1}
env=$PWD/build/clients$kind
mkdir -p build
exec 9>"$env.lock"
flock 9
wanted=examples/clients/requirements$kind.txt
key=$( (
  cat "$wanted"
  python -c 'import sys, importlib.metadata as m; print(sys.executable, m.version("torch"))'
) | sha256sum)
if [ "$(cat "$env/.made" 2>/dev/null)" != "$key" ]; then
  rm -rf "$env"
  python -m venv "$env"
  # addsitedir also reads the .pth files there: one is how ringcomm is found.
  python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
    >"$(echo "$env"/lib/python3*/site-packages)/installed.pth"
  python - >"$env/keep.txt" <<'END'
import importlib.metadata as installed

for package in installed.distributions():
    if package.name in ("torch", "numpy", "triton"):
        print(f"{package.name}=={package.version}")
END
  only=(-c "$env/keep.txt")
  [ -z "$kind" ] || only=(--no-deps)
  # shellcheck disable=SC2086  # PIP_ARGS holds several words
  "$env/bin/python" -m pip install -q --disable-pip-version-check ${PIP_ARGS:-} \
    "${only[@]}" -r "$wanted" >&2 9>&-
  echo "$key" >"$env/.made"
fi
echo "$env/bin/python"
