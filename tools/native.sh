#!/bin/sh
# Builds csrc into this checkout's jax_beam_attn/_native, with the tools of a test environment.
# usage: tools/native.sh VENV
set -eu
cd "$(dirname "$0")/.."
venv=$PWD/$1
PATH=$venv/bin:$PATH

cuda=AUTO
if [ "$(uname -sm)" = "Linux x86_64" ]; then
  CUDACXX=$(tools/nvcc.sh "$venv/bin/python" "$PWD/build/cuda")
  export CUDACXX
  cuda=ON
fi
cmake -G Ninja -S csrc -B build/csrc --fresh \
  -DPython_EXECUTABLE="$venv/bin/python" -DJAX_BEAM_ATTN_CUDA=$cuda
cmake --build build/csrc
cmake --install build/csrc
