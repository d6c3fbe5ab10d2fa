#!/usr/bin/env bash
# clang-format, clang-tidy, ruff and mypy over the whole project; `--fix` formats instead.
set -euo pipefail
cd "$(dirname "$0")/.."

existing() { for path in "$@"; do [ ! -e "$path" ] || echo "$path"; done; }
mapfile -t cpp_folders < <(existing csrc tests/cpp benchmarks)
mapfile -t python < <(existing ringcomm tests examples benchmarks scripts setup.py)
mapfile -t cpp < <(find "${cpp_folders[@]}" -name '*.h' -o -name '*.cc' | LC_ALL=C sort)

if [ "${1:-}" = --fix ]; then
  clang-format -i "${cpp[@]}"
  ruff format "${python[@]}"
  exec ruff check --fix "${python[@]}"
fi

clang-format --dry-run -Werror "${cpp[@]}"
ruff format --check "${python[@]}"
ruff check "${python[@]}"
mypy "${python[@]}"

# clang-tidy is slow: a file that passed is not read again before it, a header or a setting changes.
folder=build/lint
mkdir -p $folder/passed
cmake -S . -B $folder -G Ninja -DRINGCOMM_TESTS=ON -DPython_EXECUTABLE="$(command -v python)" \
  >$folder/configure.log || { cat $folder/configure.log >&2; exit 1; }
mapfile -t headers < <(printf '%s\n' "${cpp[@]}" | grep '\.h$')
common=$(cat .clang-tidy $folder/CMakeCache.txt "${headers[@]}" | sha256sum)
export common folder
tidy() {
  local key
  key=$( (echo "$common"; sha256sum "$1") | sha256sum | cut -d' ' -f1)
  [ -e "$folder/passed/$key" ] && return
  clang-tidy --quiet -p $folder "$1" 2> >(grep -v 'warnings generated\|^Suppressed\|^Use -header' >&2)
  touch "$folder/passed/$key"
}
export -f tidy
# Only what is compiled here: another machine's instruction sets are not. Tests and torch's side, whose
# headers cost a minute a file, are for `make lint-all`.
grep -o '"file": "[^"]*"' $folder/compile_commands.json | cut -d'"' -f4 |
  grep -vE "${RINGCOMM_LINT_SKIP:-/csrc/torch/|/tests/}" |
  xargs -P "$(env -u OMP_NUM_THREADS nproc)" -I{} bash -euc 'tidy {}'
