#!/bin/sh
# Everything that CI checks. Goes on after a failure, so that one run shows them all.
set -u
cd "$(dirname "$0")/.."
oldest=.venv-oldest newest=.venv-newest
passed=0 failed=0

step() {
  printf '\n== %s ==\n' "$1"
  shift
  start=$(date +%s)
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)) && echo "FAILED: $*"; fi
  echo "($(($(date +%s) - start)) s)"
}

finish() {
  printf '\n== Steps ==\n%d passed, %d failed\n' "$passed" "$failed"
  exit $((failed > 0))
}

step "Set up: oldest supported JAX" tools/venv.sh $oldest test 'jax==0.11.2' 'jaxlib==0.11.2'
step "Set up: newest JAX" tools/venv.sh $newest test
[ $failed = 0 ] || finish

step "Native code, CPU and CUDA" tools/native.sh $oldest
# Missing native code is a failure from here on, not a reason to skip.
export JAX_BEAM_ATTN_REQUIRE_NATIVE=1

step "Lint" $oldest/bin/ruff check
step "Format" $oldest/bin/ruff format --check
step "Types" $oldest/bin/pyright --pythonpath $oldest/bin/python
step "Tests: oldest supported JAX" $oldest/bin/python -m pytest -q
step "Tests: newest JAX" $newest/bin/python -m pytest -q
finish
