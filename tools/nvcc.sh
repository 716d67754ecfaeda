#!/bin/sh
# Prints an nvcc that can compile csrc: the machine's, or one installed from PyPI under FOLDER.
# usage: tools/nvcc.sh PYTHON FOLDER
set -eu
python=$1 folder=$2

for nvcc in ${CUDACXX:-nvcc /usr/local/cuda/bin/nvcc}; do
  if "$nvcc" --version 2>/dev/null | grep -Eq 'release (1[3-9]|[2-9][0-9])\.'; then
    command -v "$nvcc"
    exit
  fi
done

toolkit=$folder/nvidia/cu13
if [ ! -e "$folder/complete" ]; then
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
    --target "$folder" 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' \
    'nvidia-cuda-runtime==13.0.*' >&2
  # nvcc's own profile looks for the runtime in lib64, the packages have it in lib.
  ln -sfn lib "$toolkit/lib64"
  touch "$folder/complete"
fi
echo "$toolkit/bin/nvcc"
