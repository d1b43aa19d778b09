#!/bin/sh
# See that tests find the programs that they run: Chromium, promtool, PgBouncer, RabbitMQ, curl, jq, strace, nft.
# On Debian root gets the system's packages of those that are missing; no service is started or enabled. Elsewhere,
# and without them, their tests are skipped. Never fails.
set -eu

has() {
    for name; do
        command -v "$name" >/dev/null && return 0
    done
    return 1
}

missing=
has chromium-headless-shell chromium chromium-browser google-chrome ||
    missing="chromium-headless-shell fonts-dejavu-core fonts-liberation" # without fonts pages would show boxes
has promtool || missing="$missing prometheus"
has pgbouncer || missing="$missing pgbouncer"
has rabbitmq-server || missing="$missing rabbitmq-server"
for program in curl jq strace; do
    has "$program" || missing="$missing $program"
done
has nft || missing="$missing nftables"

[ -n "$missing" ] && [ "$(id -u)" -eq 0 ] && has apt-get && grep -q '^ID=debian' /etc/os-release || exit 0

policy=/usr/sbin/policy-rc.d # asked by packages before they start a service; 101 forbids it
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
fi
echo "Installing $missing with apt-get ..."
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null 2>&1 || true
for package in $missing; do
    apt-get install -qq -y --no-install-recommends "$package" >/dev/null 2>&1 </dev/null ||
        echo "postroom: $package could not be installed; its tests are skipped." >&2
    [ ! -d /run/systemd/system ] || systemctl disable -q "$package" 2>/dev/null || true
done
