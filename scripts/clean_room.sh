#!/usr/bin/env bash
# Tries a wheel on a Debian that has nothing but Python: no compiler, no OpenSSL headers.
#   scripts/clean_room.sh SUITE WHEEL [TORCH [CUDA_WHEEL]]      as root, with debootstrap
# SUITE is bookworm (Python 3.11), trixie (3.13) or another one; TORCH is 2.13.0 without it, and a
# CUDA_WHEEL, of ringcomm-cuda, is installed with the other one. Counts the seconds from
# `pip install` to the first sum of two ranks, runs the doctor, uninstalls, and looks whether
# something was left. PIP_ARGS is given to pip, MIRROR to debootstrap, and the folders that FOLDERS
# names can be seen inside. The room stays in build/rooms for the next time.
set -euo pipefail
cd "$(dirname "$0")/.."

suite=$1 wheel=$(realpath "$2") torch=${3:-2.13.0} cuda=${4:+$(realpath "$4")}
room=$PWD/build/rooms/$suite
if [ ! -e "$room/ready" ]; then
  mkdir -p "$room"
  # shellcheck disable=SC2086  # MIRROR is a word, or none
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
    "$suite" "$room" ${MIRROR:-} >"$room.log" || { tail -3 "$room.log" >&2; exit 1; }
  cp /etc/ssl/certs/ca-certificates.crt "$room/etc/ssl/certs/"
  touch "$room/ready"
fi
cp /etc/resolv.conf "$room/etc/"
echo "127.0.0.1 localhost" >"$room/etc/hosts"  # torchrun asks for it
rm -rf "$room/tmp/wheels"
mkdir "$room/tmp/wheels"
cp "$wheel" ${cuda:+"$cuda"} "$room/tmp/wheels/"
cat >"$room/tmp/hello.py" <<'HELLO'
import torch
import torch.distributed as dist

dist.init_process_group("ringcomm")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
assert total.item() == 3, total
HELLO
cat >"$room/tmp/try.sh" <<'TRY'
set -euo pipefail
torch=$1 env=/opt/torch-$1
! command -v gcc g++ cc c++ clang nvcc || { echo "a compiler is here"; exit 1; }
if [ ! -e "$env/ready" ]; then
  python3 -m venv "$env"
  "$env/bin/pip" install -q ${PIP_ARGS:-} "torch==$torch" numpy && touch "$env/ready"
fi
export PATH=$env/bin:$PATH OMP_NUM_THREADS=1 HOME=/tmp/home
mkdir -p "$HOME"
pip uninstall -qq -y ringcomm ringcomm-cuda # of a run that failed
files() { find "$env" "$HOME" /dev/shm -not -name '*.pyc' -not -name __pycache__ | sort; }
hello() { torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 /tmp/hello.py; }
python -c 'import torch' # so that its bytecode is not counted
files >/tmp/before
begin=$(date +%s.%N)
pip install -q --no-index --no-deps /tmp/wheels/*.whl
hello
seconds=$(python -c "import time; print(f'{time.time() - $begin:.1f}')")
ringcomm doctor >/tmp/doctor.txt || { cat /tmp/doctor.txt; exit 1; }
version=$(ringcomm --version)
libc=$(ldd --version | sed -n '1s/.* //p')
libraries=$(cd "$env" && find . -name 'libringcomm*.so' -printf '%f ')
pip uninstall -qq -y ringcomm ringcomm-cuda
files >/tmp/after
diff /tmp/before /tmp/after || { echo "uninstalling left these"; exit 1; }
echo "$(. /etc/os-release; echo "$PRETTY_NAME"), glibc $libc, $(python -V), torch $torch: $version, ${libraries% };" \
  "$seconds s from pip install to the first sum; nothing was left"
TRY
for folder in ${FOLDERS:-}; do mkdir -p "$room$folder"; done
export room folders="${FOLDERS:-}"
# Mounts in a namespace of its own, which end with it.
exec unshare --mount --pid --fork bash -euc '
  mount -t proc proc "$room/proc"
  mount -t tmpfs tmpfs "$room/dev"
  mkdir "$room/dev/shm"
  for name in null zero urandom random; do
    touch "$room/dev/$name"; mount --bind "/dev/$name" "$room/dev/$name"
  done
  for folder in $folders; do mount --bind "$folder" "$room$folder"; done
  exec chroot "$room" bash /tmp/try.sh "$@"' _ "$torch"
