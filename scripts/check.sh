#!/usr/bin/env bash
# The tests nearest to a change: scripts/check.sh, or `make check`. About a minute, where the change
# is not in csrc/torch, elastic or compression: these have tests of whole jobs.
#
# What differs from the last commit (BASE=main: from main) decides. A folder of csrc brings its own
# C++ tests, one of ringcomm its own in Python; a file of tests brings itself; and a few calls of
# torch.distributed run in any case. `--list FILE...` names the tests of these files, and runs none.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = --list ]; then
  changed=$(printf '%s\n' "${@:2}")
else
  changed=$(git diff --name-only "${BASE:-HEAD}"; git ls-files --others --exclude-standard)
fi
programs=$(sed -n '/^set(test_programs /,/)/p' CMakeLists.txt | tr ' ()' '\n\n\n')
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
    torch)
      places=
      tests+=(tests/backend)
      ;;
    *) places=$folder ;;
  esac
  for place in $places; do
    for source in tests/cpp/"$place"/*.cc; do
      name=$(basename "$source" .cc)
      ! grep -qx "$place/$name" <<<"$programs" ||
        tests+=("tests/cpp/test_cpp.py::test_program[$name]")
    done
  done
done
# A folder or a file of the package, and of its commands.
for room in $(sed -nE 's#^ringcomm/((tools/)?[^/]+).*#\1#p' <<<"$changed" | sort -u); do
  case $room in
    algorithms) tests+=(tests/tools/test_{algorithms,plans}_by_hand.py tests/backend/test_registered.py) ;;
    compression | hooks.py) tests+=(tests/hooks) ;;
    elastic | torchft.py) tests+=(tests/elastic) ;;
    _flight) tests+=(tests/tools/test_{flight,numbers,record_files,record_texts,records,stragglers}.py) ;;
    _network) tests+=(tests/network/test_{order,tune}.py) ;;
    tools/plan | plan.py)
      tests+=(tests/tools/test_{draw,notebook,plan,plans_by_hand,search,simulate}.py)
      ;;
    tools/tune) tests+=(tests/network/test_tune.py tests/device/test_tune_kernels.py) ;;
    tools/store.py) tests+=(tests/elastic/test_launchers.py) ;;
    tools/svg.py) tests+=(tests/tools/test_{draw,plan,simulate}.py) ;;
    tools/bench | tools/doctor | tools/trace | tools/top.py)
      name=${room#tools/}
      tests+=(tests/tools/test_"${name%.py}"*.py)
      ;;
    tools/*) tests+=(tests/tools/test_{page,plan,trace_pages}.py) ;;
    *) tests+=(tests/package/test_{activated,former_names,host,options,start}.py) ;;
  esac
done
for file in $(grep -E '^tests/.*/test_[a-z_]+\.py$' <<<"$changed" || true); do
  [ ! -e "$file" ] || tests+=("$file")
done

if [ "${1:-}" = --list ]; then
  printf '%s\n' "${tests[@]}"
  exit
fi
echo "check: changed in csrc:" ${folders:-nothing} >&2
exec python -m pytest -q -r f "${tests[@]}"
