#!/bin/sh
# A selection of the GPU tests below compute-sanitizer: accesses out of bounds, and races in shared
# memory. Only the library's own kernels are checked, all selections at the same time.
# usage: [PYTHON=python3] tests/gpu/sanitize.sh FOLDER_FOR_LOGS [SELECTION...]
set -u
mkdir -p "$1"
logs=$(cd "$1" && pwd)
shift
selections=${*:-beam-triton beam-hopper mla turboquant turboquant-store native}
cd "$(dirname "$0")/../.."
export JAX_BEAM_ATTN_TEST_GPU=1
# A buffer of its own for each array, without others behind it.
export XLA_PYTHON_CLIENT_ALLOCATOR=platform

check() {
  tool=$1 name=$2 tests=$3 select=$4
  case " $selections " in *" $name "*) ;; *) return ;; esac
  compute-sanitizer --tool "$tool" --target-processes application-only --error-exitcode 1 \
    --report-api-errors no \
    --kernel-name kns=attend_kernel --kernel-name kns=merge_kernel \
    --kernel-name kns=store_kernel --kernel-name kns=dequantize_kernel \
    --kernel-name kns=Attend --kernel-name kns=AppendTokens --kernel-name kns=Cut \
    "${PYTHON:-python3}" -W ignore -m pytest -q -p no:cacheprovider "tests/gpu/$tests" -k "$select" \
    >"$logs/$tool-$name.txt" 2>&1 && echo "$tool $name: clean" || echo "$tool $name: FAILED"
}

# The rows of a covering set, as pytest's -k has them.
rows() {
  for row; do printf '[%s- or -%s] or ' "$row" "$row"; done
  echo '[]'
}

{
  for tool in memcheck racecheck; do
    check $tool beam-triton test_beam_decode.py "covering_set and triton and ($(rows 1 11 24 37 57 71 96))" &
    check $tool beam-hopper test_beam_decode.py "covering_set and cute and ($(rows 2 14 28 43 61 80 98))" &
    check $tool mla test_sparse_mla.py "covering_set and ($(rows 6 17 19 43 54 91))" &
    check $tool turboquant test_turboquant.py "covering_set and ($(rows 4 14 39 44 69 90 108))" &
    check $tool turboquant-store test_turboquant.py "store and bfloat16-4-4" &
    check $tool native test_native_mla.py "append and ($(rows 2 7 40)) or schedule and ($(rows 0))" &
  done
  wait
} >"$logs/summary.txt"
cat "$logs/summary.txt"
! grep -q FAILED "$logs/summary.txt"
