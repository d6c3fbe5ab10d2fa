#!/usr/bin/env bash
# The tests nearest to a change, in about a minute: scripts/check.sh, or `make check`.
#
# What differs from the last commit (BASE=main: from main) decides. A folder of csrc brings its own
# C++ tests; a file of tests brings itself; and a few calls of torch.distributed run in any case.
set -euo pipefail
cd "$(dirname "$0")/.."

changed=$(git diff --name-only "${BASE:-HEAD}"; git ls-files --others --exclude-standard)
folders=$(sed -nE 's#^(csrc|tests/cpp)/([^/]+)/.*#\2#p' <<<"$changed" | sort -u)
programs=()
for folder in $folders; do
  # Folders without tests of their own: the ones above them have some.
  case $folder in
    base) folder="net transport" ;;
    exec) folder=comm ;;
    cuda) folder=device ;;
    verify) folder=plan ;;
  esac
  for place in $folder; do
    for source in tests/cpp/"$place"/*.cc; do
      [ ! -e "$source" ] || programs+=("$(basename "$source" .cc)")
    done
  done
done
mapfile -t tests < <(grep -E '^tests/.*/test_[a-z_]+\.py$' <<<"$changed" | grep -v test_cpp | xargs -r ls -d 2>/dev/null)

echo "check: ${folders:-nothing} changed in csrc; ${#tests[@]} test files did" >&2
if [ ${#programs[@]} -gt 0 ]; then
  only="test_program and ($(printf '%s\n' "${programs[@]}" | sort -u | paste -sd '|' | sed 's/|/ or /g'))"
  python -m pytest -q -r f tests/cpp/test_cpp.py -k "$only and not sanitizer" || [ $? = 5 ]  # none
fi
python -m pytest -q -r f tests/backend/test_backend.py -k "[2"  # on 2 ranks
exec python -m pytest -q -r f tests/test_house.py "${tests[@]}"
