#!/usr/bin/env bash
# Debian's headless Chromium for the tests, unpacked below a folder, where none is on the PATH.
# Nothing is installed, and no rights are needed: TO/run starts it with the libraries beside it
# (0.5 GB where the machine has none of them).
set -euo pipefail

if [ "$#" != 1 ]; then echo "usage: $0 TO" >&2; exit 2; fi
if [ -x "$1/run" ]; then exit 0; fi
for name in chromium-headless-shell chrome-headless-shell chromium google-chrome; do
    if command -v "$name" > /dev/null; then exit 0; fi
done
if ! command -v apt-get > /dev/null; then
    echo "There is no Chromium on the PATH, and no apt-get to fetch one with." >&2
    exit 1
fi
mkdir -p "$1"
to=$(cd "$1" && pwd)
# A list of packages and a cache of its own: the machine's are only read, if at all.
mkdir -p "$to/lists/partial" "$to/archives/partial"
apt() {
    apt-get -qq -o "Dir::State::Lists=$to/lists" -o "Dir::Cache=$to" -o Debug::NoLocking=1 \
        -o APT::Sandbox::User=root -o Acquire::http::Timeout=20 -o Acquire::Languages=none "$@"
}
apt update
# What it needs and this machine lacks.
files=$(apt --print-uris -y --no-install-recommends install chromium-headless-shell |
    sed -nE "s/^'[^']*' ([^_ ]+)_.*/\1/p")
cd "$to/archives"
# shellcheck disable=SC2086
apt download $files
for file in ./*.deb; do dpkg -x "$file" "$to/root"; done
rm -rf "$to/lists" "$to/archives" "$to"/*.bin
libraries=$to/root/usr/lib/$(uname -m)-linux-gnu
cat > "$to/run" << END
#!/bin/sh
export LD_LIBRARY_PATH="$libraries:$libraries/pulseaudio:$to/root/lib/$(uname -m)-linux-gnu"
export XDG_DATA_HOME="$to/root/usr/share"  # fonts
if [ ! -e /etc/fonts/fonts.conf ]; then export FONTCONFIG_PATH="$to/root/etc/fonts"; fi
exec "$to/root/usr/lib/chromium/chromium-headless-shell" "\$@"
END
chmod +x "$to/run"
if ! "$to/run" --version; then rm "$to/run"; exit 1; fi
