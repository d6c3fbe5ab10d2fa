#!/usr/bin/env bash
# Builds the engine and the C++ test programs without torch:  scripts/cpp.sh VARIANT [PROGRAM...]
# VARIANT: plain, a sanitizer (address, thread, undefined; hostile: address and undefined), fuzz
# (the fuzz programs with clang's libFuzzer), or arm64 (Debian's cross compiler).
# TARGETS="stress" builds that program only. The programs are in build/VARIANT/bin; those named are then run, `all` runs every one.
set -euo pipefail
cd "$(dirname "$0")/.."

variant=$1
shift
options=()
# Kernels with two sanitizers take the compiler minutes at -O3.
hostile=("-DRINGCOMM_SANITIZE=address,undefined" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=-O1)
case $variant in
  plain) ;;
  address | undefined) options+=("-DRINGCOMM_SANITIZE=$variant") ;;
  thread) options+=("-DRINGCOMM_SANITIZE=thread" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=-O1) ;;
  hostile) options+=("${hostile[@]}") ;;
  fuzz)
    command -v clang++ >/dev/null || {
      echo "ringcomm: clang++ is needed: \`apt install clang\`" >&2
      exit 1
    }
    options+=("${hostile[@]}" -DCMAKE_CXX_COMPILER=clang++ -DRINGCOMM_LIBFUZZER=ON)
    ;;
  arm64)
    for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
      command -v $tool >/dev/null || {
        echo "ringcomm: $tool is needed: \`apt install g++-aarch64-linux-gnu qemu-user\`" >&2
        exit 1
      }
    done
    # 7.2 aborts where a program with threads forks.
    [ "$(qemu-aarch64 --version | sed -n '1s/.*version \([0-9]*\).*/\1/p')" -ge 10 ] || {
      echo "ringcomm: qemu 10 or newer is needed, which Debian 13 has" >&2
      exit 1
    }
    folder=/usr/lib/aarch64-linux-gnu
    [ -e $folder/libssl.a ] || {
      echo "ringcomm: OpenSSL for arm64 is needed: \`dpkg --add-architecture arm64 && apt update &&" \
        "apt install libssl-dev:arm64\`" >&2
      exit 1
    }
    options+=(-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64
      -DOPENSSL_CRYPTO_LIBRARY=$folder/libcrypto.a -DOPENSSL_SSL_LIBRARY=$folder/libssl.a
      "-DOPENSSL_INCLUDE_DIR=/usr/include;/usr/include/aarch64-linux-gnu"
      -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
      # Loader and C library both come from libc6:arm64, which OpenSSL needs. The cross compiler's
      # may have another version, and with one of each no thread starts.
      "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-E;LD_LIBRARY_PATH=/lib/aarch64-linux-gnu:/usr/aarch64-linux-gnu/lib")
    ;;
  *)
    echo "ringcomm: no variant $variant: use plain, address, thread, undefined, hostile, fuzz or arm64" >&2
    exit 1
    ;;
esac

folder=build/$variant
mkdir -p "$folder"
(
  flock 9
  {
    cmake -S . -B "$folder" -G Ninja -DPython_EXECUTABLE="$(command -v python)" \
      -DRINGCOMM_TORCH=OFF -DRINGCOMM_TESTS=ON \
      -DRINGCOMM_WERROR="${RINGCOMM_WERROR:-OFF}" "${options[@]}" &&
      cmake --build "$folder" -j "${MAX_JOBS:-$(env -u OMP_NUM_THREADS nproc)}" \
        ${TARGETS:+--target $TARGETS}
  } >"$folder/build.log" 2>&1 9>&- || { tail -40 "$folder/build.log" >&2; exit 1; }
) 9>"$folder/lock"

[ $# -eq 0 ] && exit 0
only=()
[ "$1" = all ] || only=(-R "^($(IFS='|'; echo "$*"))\$")
exec ctest --test-dir "$folder" --output-on-failure --no-tests=error "${only[@]}"
