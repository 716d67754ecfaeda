#!/bin/sh
# Everything that CI checks. Goes on after a failure, so that one run shows them all.
set -u
cd "$(dirname "$0")/.."
oldest=.venv-oldest newest=.venv-newest
passed=0 failed=0

step() {
  title=$1
  shift
  printf '\n== %s ==\n' "$title"
  start=$(date +%s)
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)) && echo "FAILED: $title"; fi
  echo "($(($(date +%s) - start)) s)"
}

# The output and status of a suite in the background, once it has ended.
result() {
  wait "$1"
  status=$?
  cat "$2"
  return $status
}

finish() {
  printf '\n== Steps ==\n%d passed, %d failed\n' "$passed" "$failed"
  exit $((failed > 0))
}

step "Set up: oldest supported JAX" tools/venv.sh $oldest test 'jax==0.11.2' 'jaxlib==0.11.2'
step "Set up: newest JAX" tools/venv.sh $newest test
[ $failed = 0 ] || finish

mkdir -p build
step "Native code, CPU and CUDA" tools/native.sh $oldest
# Missing native code is a failure from here on, not a reason to skip.
export JAX_BEAM_ATTN_REQUIRE_NATIVE=1

step "Lint" $oldest/bin/ruff check
step "Format" $oldest/bin/ruff format --check
step "Types" $oldest/bin/pyright --pythonpath $oldest/bin/python

# Side by side, because one suite does not keep two cores busy; each prints when it has ended. What
# does not depend on JAX's version runs in one of them, so that both take as long: wheels, Triton's
# interpreter and the benchmarks here, the compilation of the operators' kernels there.
$oldest/bin/python -m pytest -q --durations=15 --ignore=tests/beam_decode/test_compile.py \
  --ignore=tests/sparse_mla/test_compile.py --ignore=tests/turboquant/test_compile.py \
  >build/tests-oldest.log 2>&1 &
oldest_suite=$!
$newest/bin/python -m pytest -q --durations=15 --ignore=tests/native/test_wheel.py \
  --ignore=tests/test_interpreted.py --ignore=tests/bench >build/tests-newest.log 2>&1 &
newest_suite=$!
trap 'kill $oldest_suite $newest_suite; exit 1' INT TERM
step "Tests: oldest supported JAX" result $oldest_suite build/tests-oldest.log
step "Tests: newest JAX" result $newest_suite build/tests-newest.log
finish
