#!/bin/sh
# Prints a Python that can make virtual environments and for which JAX has wheels, or says what is
# wrong. PYTHON=... names one.
set -u

# Run, not looked up: a shim on PATH may stand for a version that is not installed.
runs() { "$1" -c "$2" >/dev/null 2>&1; }

incomplete=
for python in ${PYTHON:-python3.12 python3.13 python3.14 \
    "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python python3 python}; do
  runs "$python" 'import sys; assert sys.version_info >= (3, 12)' || continue
  if runs "$python" 'import ensurepip, venv'; then
    echo "$python"
    exit
  fi
  incomplete=$python
done

if [ "$incomplete" ]; then
  echo "$incomplete cannot make virtual environments: it lacks venv or ensurepip." >&2
  echo "On Debian and Ubuntu they come with: apt-get install python3-venv (or python3.12-venv)" >&2
else
  echo "No working Python 3.12 or later found${PYTHON:+ as PYTHON=$PYTHON}." >&2
  echo "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2
fi
exit 1
