#!/usr/bin/env bash
# Checks and times mlx_zip on one NVIDIA card in under nine minutes; builds nothing and downloads nothing.
#
#   bench/h100.sh [--cpu-rehearsal] [FOLDER]
#
# The parts that $PARTS names run, or all: float64 sanitizer checks kernels steps generate free trace summary.
# FOLDER (else $OUT, else ./nvidia-records) receives the records. It needs Python with torch, triton, numpy, cffi,
# safetensors, transformers and pytest, and mlx_zip: installed, or as wheels in the folder $WHEELS. $PYTHON names the
# Python.
# Every part is bounded by a timeout; a part that fails or runs out of time is named at the end, and the others still run.
# --cpu-rehearsal runs every part at tiny sizes on the CPU, so that only the device's own branches are left untried.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
rehearsal=0
folder=
for word in "$@"; do
    case $word in
        --cpu-rehearsal) rehearsal=1 ;;
        -*) echo "error: unknown flag $word" >&2; exit 2 ;;
        *) folder=$word ;;
    esac
done
folder=${folder:-${OUT:-nvidia-records}}
mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$scratch/triton}

if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$scratch/site" "$WHEELS"/*.whl || exit 2
    export PYTHONPATH=$scratch/site${PYTHONPATH:+:$PYTHONPATH}
fi
cd "$scratch" || exit 2  # so that the checkout's own folder does not hide what is installed
if ! "$python" -c 'import torch, triton, cffi, safetensors, transformers, mlx_zip.codec, mlx_zip.bench.nvidia' >&2; then
    echo "error: $python lacks a library; install mlx_zip, or name its wheels with WHEELS=FOLDER" >&2
    exit 2
fi
flags=()
scale=1
if [ $rehearsal = 1 ]; then
    flags=(--rehearse)
    scale=12 # a CPU, perhaps a busy one
    export CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1
elif ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    echo "error: torch finds no CUDA card; --cpu-rehearsal runs every part on the CPU" >&2
    exit 2
fi

failed=()
part() {  # part NAME SECONDS COMMAND...: runs a command for at most SECONDS and keeps what it prints
    local name=$1 limit=$((scale * $2)) begun=$SECONDS status
    shift 2
    [[ " ${PARTS:-$name} " == *" $name "* ]] || return 0
    echo "== $name (at most $limit s)"
    timeout -k 5 "$limit" "$@" 2>&1 | tee "$folder/$name.log"
    status=${PIPESTATUS[0]}
    echo "-- $name: exit status $status after $((SECONDS - begun)) s"
    [ "$status" = 0 ] || failed+=("$name")
}
bench() {  # bench PART SECONDS
    part "$1" "$2" "$python" -m mlx_zip.bench nvidia --out "$folder" ${flags[@]+"${flags[@]}"} --parts "$1"
}

{ "$python" -m torch.utils.collect_env || true; } >"$folder/environment.txt" 2>&1
# kernels against float64, with fresh inputs, poisoned outputs and guarded borders
tests=(test_head test_matvec test_decode_attention test_embedding test_encoder test_norm_and_gate test_rope test_unpack)
[ $rehearsal = 1 ] && tests=(test_embedding)
several=() # every test compiles kernels of its own
"$python" -c 'import xdist' 2>/dev/null && several=(-n 8)
files=("${tests[@]/#/$root/tests/cuda/}")
files=("${files[@]/%/.py}")
part float64 110 "$python" -m pytest -q -p no:cacheprovider --rootdir "$root" -c "$root/pyproject.toml" \
    ${several[@]+"${several[@]}"} "${files[@]}"
if [ $rehearsal = 0 ] && command -v compute-sanitizer >/dev/null; then
    part sanitizer 45 compute-sanitizer --error-exitcode 9 "$python" -m pytest -q -x -p no:cacheprovider \
        --rootdir "$root" -c "$root/pyproject.toml" "$root/tests/cuda/test_embedding.py"
else
    echo "== sanitizer: not run ($([ $rehearsal = 1 ] && echo "no GPU" || echo "compute-sanitizer is not installed"))"
fi
bench checks 50
bench kernels 60
bench steps 85
bench generate 100
bench free 25
bench trace 25
bench summary 10

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed or out of time: ${failed[*]}"
    exit 1
fi
echo "every part ran; records in $folder, after $SECONDS s"
