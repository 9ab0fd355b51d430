#!/bin/sh
# Fuzzes the C code, SECONDS (default 20) per target, under address and undefined-behaviour sanitizers:
#   native/fuzz/run.sh [SECONDS [TARGET...]]     targets: compress push bytes rows phrases bpe patches lookup
# With libFuzzer (clang) coverage leads and inputs are kept in corpus/; otherwise driver.c makes random ones.
set -eu
cd "$(dirname "$0")"
seconds=${1:-20}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- compress push bytes rows phrases bpe patches lookup
mkdir -p bin
flags="-std=c11 -O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all"
library="../params.c ../compress.c ../turns.c ../codebook.c ../read.c ../bytes.c ../rows.c"
library="$library ../phrases.c ../phrases_encode.c ../pieces.c ../bpe.c ../patches.c ../lookup.c"
fuzzer=${FUZZ_CC:-clang}
printf '#include "fuzz.h"\nint LLVMFuzzerTestOneInput(const uint8_t *d, size_t n) { return d && n ? 0 : 0; }\n' > bin/probe.c
for target in "$@"; do
  echo "== $target: $seconds s"
  if "$fuzzer" -I. -fsanitize=fuzzer,address,undefined bin/probe.c -o bin/probe >/dev/null 2>&1; then
    mkdir -p "corpus/$target"
    "$fuzzer" $flags -fsanitize=fuzzer,address,undefined "fuzz_$target.c" $library -o "bin/$target"
    "bin/$target" -max_total_time="$seconds" -max_len=2048 -print_final_stats=1 -verbosity=0 \
      -artifact_prefix=bin/ "corpus/$target"
  else
    "${CC:-cc}" $flags -fsanitize=address,undefined "fuzz_$target.c" driver.c $library -o "bin/$target"
    "bin/$target" "$seconds"
  fi
done
