#!/bin/sh
# Create the virtual environment and install requirements.txt and this package into it. Does nothing when that is done.
#
# usage: set_up.sh PYTHON VENV
#
# "Done" is a stamp file in VENV, named after a checksum of all that the set-up depends on. It is removed first and
# written last, so that a set-up that failed or was interrupted is taken up again by the next call.
set -eu

python=$1
venv=$2
cd -- "$(dirname -- "$0")/.."

fail() {
    printf 'set-up: %s\n  fix: %s\n' "$1" "$2" >&2
    exit 2
}

version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

version=$(version_of "$python")
case $version in
    3.11 | 3.12 | 3.13) ;;
    '') fail "cannot run '$python'" "install Python 3.11, 3.12 or 3.13, or name it: make PYTHON=/path/to/python3 ..." ;;
    *) fail "'$python' is Python $version, and graphstep needs 3.11, 3.12 or 3.13" "name another one: make PYTHON=python3.12 ..." ;;
esac

# The folder belongs to the key because an editable install points at it.
key=$({ cat requirements.txt pyproject.toml && pwd && echo "$version"; } | cksum | tr -d ' ')
stamp=$venv/set-up-$key
if [ -e "$stamp" ] && [ "$(version_of "$venv/bin/python")" = "$version" ]; then
    exit 0
fi

if [ -d "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    fail "'$venv' exists and is no virtual environment" "remove it, or name another folder: make VENV=.venv-graphstep ..."
fi
rm -f "$venv"/set-up-*
if [ "$(version_of "$venv/bin/python")" != "$version" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "'$python' comes without the modules venv and ensurepip" "on Debian and Ubuntu: apt-get install python$version-venv"
    echo "set-up: creating $venv with Python $version"
    "$python" -m venv --clear "$venv"
fi
echo "set-up: installing the pinned requirements into $venv (once; PyTorch is a large download)"
"$venv/bin/python" -m pip install --disable-pip-version-check --requirement requirements.txt
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-build-isolation --no-deps --editable .
: >"$stamp"
echo "set-up: done"
