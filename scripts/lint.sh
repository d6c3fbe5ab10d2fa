#!/usr/bin/env bash
# clang-format, clang-tidy, ruff, mypy and scripts/prose.py; `--fix` formats instead. clang-tidy
# reads the engine; with LINT_ALL=1 it reads torch's side and the tests too, and clang's analyzer
# runs: minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

existing() { for path in "$@"; do [ ! -e "$path" ] || echo "$path"; done; }
mapfile -t cpp_folders < <(existing csrc tests/cpp tests/sim benchmarks)
mapfile -t python < <(existing ringcomm lab tests examples benchmarks scripts setup.py)
mapfile -t cpp < <(find "${cpp_folders[@]}" -name '*.h' -o -name '*.cc' -o -name '*.cu' | LC_ALL=C sort)

if [ "${1:-}" = --fix ]; then
  clang-format -i "${cpp[@]}"
  ruff format "${python[@]}"
  exec ruff check --fix "${python[@]}"
fi

clang-format --dry-run -Werror "${cpp[@]}"
ruff format --check "${python[@]}"
ruff check "${python[@]}"
PYTHONPATH=. python scripts/prose.py
mypy "${python[@]}" &  # it uses one processor
types=$!

# clang-tidy is slow, at headers most of all: it reads several files in one run, as the compiler does.
# A run that passed is not made again before its files, a header or a setting changes.
folder=build/lint
mkdir -p $folder/passed
cmake -S . -B $folder -G Ninja -DRINGCOMM_TESTS=ON -DPython_EXECUTABLE="$(command -v python)" \
  >$folder/configure.log || { cat $folder/configure.log >&2; exit 1; }
mapfile -t headers < <(printf '%s\n' "${cpp[@]}" | grep '\.h$')
deep='' skip='/csrc/torch/|/tests/|/benchmarks/|\.cu$'
[ -z "${LINT_ALL:-}" ] || deep='--checks=clang-analyzer-*' skip='\.cu$'
common=$(cat .clang-tidy csrc/*/.clang-tidy $folder/compile_commands.json "${headers[@]}" - <<<"$deep" |
  sha256sum)
export common folder deep
members() { sed -n 's#^\#include "\(.*\)"  // NOLINT.*#csrc/\1#p' "$1"; }
tidy() {
  local key
  key=$( (echo "$common"; sha256sum "$1"; members "$1" | xargs -r sha256sum) | sha256sum | cut -d' ' -f1)
  [ -e "$folder/passed/$key" ] && return
  # shellcheck disable=SC2086  # no word, or one
  clang-tidy --quiet $deep --extra-arg=-Wthread-safety -p $folder "$1" 2> >(grep -v 'warnings generated\|^Suppressed\|^Use -header' >&2)
  touch "$folder/passed/$key"
}
export -f tidy members
# Only what is compiled here: another machine's instruction sets are not, and kernels are nvcc's.
grep -o '"file": "[^"]*"' $folder/compile_commands.json | cut -d'"' -f4 |
  grep -vE "$skip" |
  xargs -P "$(env -u OMP_NUM_THREADS nproc)" -I{} bash -euc 'tidy {}'
wait "$types"
