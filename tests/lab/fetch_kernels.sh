#!/bin/sh
# Unpack two of Debian's kernels: fetch_kernels.sh DIR makes DIR/6.1 and DIR/newer. The packages are not installed.
set -eu
mkdir -p "$1"
cd "$1"
listed=$(apt-cache search --names-only '^linux-image-[0-9].*-amd64$' | cut -d' ' -f1 | grep -Ev 'unsigned|cloud|-rt-' | sort -V)
for pair in "6.1 ^linux-image-6[.]1[.]" "newer ."; do
    name=${pair%% *}
    package=$(printf '%s\n' "$listed" | grep -E "${pair#* }" | tail -1)
    [ -n "$package" ] || { echo "no kernel $name among the packages: apt-get update, on Debian 12" >&2; exit 1; }
    apt-get download "$package"
    rm -rf "$name"
    dpkg-deb -x "$package"_*.deb "$name"
    rm "$package"_*.deb
done
