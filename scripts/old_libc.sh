#!/usr/bin/env bash
# Makes stubs of glibc 2.28 to link a wheel's libraries with:  scripts/old_libc.sh ARCH FOLDER
# ARCH is x86_64 or aarch64. Zig brings the symbols of each glibc; the package on PATH's Python has
# it. FOLDER then has libc.so and so on, and libc_nonshared.a.
set -euo pipefail

arch=$1
folder=$(mkdir -p "$2" && cd "$2" && pwd)
[ -e "$folder/libc_nonshared.a" ] && exit 0
export ZIG_GLOBAL_CACHE_DIR=$folder/cache ZIG_LOCAL_CACHE_DIR=$folder/cache
echo 'int nothing;' >"$folder/nothing.c"
python -m ziglang cc -target "$arch-linux-gnu.2.28" -shared -o "$folder/nothing.so" \
  "$folder/nothing.c" -lm -lpthread -ldl
stubs=$(dirname "$(find "$folder/cache" -name 'libpthread.so.0' | head -1)")
for library in "$stubs"/lib*.so.*; do
  name=$(basename "$library")
  ln -sf "$library" "$folder/${name%.so.*}.so"
done
# Last: what says that all of it is here.
cp "$(find "$folder/cache" -name libc_nonshared.a | head -1)" "$folder/libc_nonshared.a"
