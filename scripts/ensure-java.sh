#!/bin/sh
# See that Spark finds Java 17 or newer; where there is none, set it up.
# On Debian and Ubuntu root gets the system's package; anyone else gets a JDK of their own in .venv/jdk.
set -eu
cd "$(dirname "$0")/.."

is_recent() {
    version=$("$1" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p')
    [ "${version:-0}" -ge 17 ]
}

has_java() {
    is_recent .venv/jdk/bin/java || is_recent "${JAVA_HOME:-/nonexistent}/bin/java" ||
        { [ -z "${JAVA_HOME:-}" ] && is_recent java; }
}

install_system_java() {
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || return 1
    echo "Installing Java 17 or newer with apt-get ..."
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >/dev/null 2>&1 || true
    for package in openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless; do
        apt-get install -qq -y --no-install-recommends "$package" >/dev/null 2>&1 </dev/null && return 0
    done
    return 1
}

install_own_java() {
    echo "Installing a Java 17 runtime into .venv/jdk ..."
    .venv/bin/python - 2>/dev/null <<'PYTHON'
import pathlib

import jdk

home = pathlib.Path(jdk.install("17", jre=True, path=".venv/jdks"))
pathlib.Path(".venv/jdk").symlink_to(home.resolve())
PYTHON
}

has_java && exit
install_system_java && has_java && exit
install_own_java && has_java && exit
echo "postroom: Spark needs Java 17 or newer: install a JDK (for example openjdk-17-jre-headless) or set JAVA_HOME." >&2
exit 1
