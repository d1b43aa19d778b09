#!/bin/sh
# See that the tests in a browser find Chromium; where there is none, set it up.
# On Debian root gets the system's package; for anyone else those tests are skipped. Never fails.
set -eu

names="chromium chromium-browser google-chrome"

has_chromium() {
    for name in $names; do
        command -v "$name" >/dev/null && return 0
    done
    return 1
}

# Without fonts pages would show boxes.
install_chromium() {
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && grep -q '^ID=debian' /etc/os-release 2>/dev/null ||
        return 1
    echo "Installing Chromium with apt-get ..."
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >/dev/null 2>&1 || true
    apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core fonts-liberation \
        >/dev/null 2>&1 </dev/null
}

has_chromium && exit
install_chromium && has_chromium && exit
echo "postroom: Chromium was not found; the tests in a browser are skipped. Install the package chromium." >&2
