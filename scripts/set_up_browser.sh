#!/bin/sh
# Install Chromium where there is no browser of its family: a test opens the page of a report in one. Needs Debian and root.
set -eu

for name in chromium chromium-browser google-chrome google-chrome-stable chrome chrome-headless-shell; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
    printf 'set-up: there is no browser, and this is not root on Debian\n  fix: install Chromium or Chrome by hand\n' >&2
    exit 2
fi
echo "set-up: installing Chromium"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install --yes --no-install-recommends chromium; } >"$log" 2>&1; then
    tail -20 "$log" >&2
    exit 2
fi
