#!/usr/bin/env bash
# The tests nearest to a change, in about a minute: scripts/check.sh, or `make check`.
#
# What differs from the last commit (BASE=main: from main) decides. A folder of csrc brings its own
# C++ tests; a file of tests brings itself; and a few calls of torch.distributed run in any case.
set -euo pipefail
cd "$(dirname "$0")/.."

changed=$(git diff --name-only "${BASE:-HEAD}"; git ls-files --others --exclude-standard)
folders=$(sed -nE 's#^(csrc|tests/cpp)/([^/]+)/.*#\2#p' <<<"$changed" | sort -u)
tests=(tests/test_house.py)
for call in work layouts wrong_arguments life; do
  tests+=("tests/backend/test_backend.py::test_${call}[2 ranks]")
done
for folder in $folders; do
  # Folders without tests of their own: the ones above them have some.
  case $folder in
    base) places="net transport" ;;
    exec | report | group | host | message | progress) places=comm ;;
    cuda | stream) places=device ;;
    verify) places=plan ;;
    *) places=$folder ;;
  esac
  for place in $places; do
    for source in tests/cpp/"$place"/*.cc; do
      name=$(basename "$source" .cc)
      ! grep -q "^    \"$name\",$" tests/cpp/test_cpp.py ||
        tests+=("tests/cpp/test_cpp.py::test_program[$name]")
    done
  done
done
for file in $(grep -E '^tests/.*/test_[a-z_]+\.py$' <<<"$changed" || true); do
  [ ! -e "$file" ] || tests+=("$file")
done

echo "check: changed in csrc:" ${folders:-nothing} >&2
exec python -m pytest -q -r f "${tests[@]}"
