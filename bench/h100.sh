#!/usr/bin/env bash
# Checks and times mlx_zip on one NVIDIA card in under nine minutes; builds nothing and downloads nothing.
#
#   bench/h100.sh [--cpu-rehearsal] [--code FILE] [--tokenizer NAME] [--engines "NAME NAME"] [--published DIR] [FOLDER]
#
# The parts that $PARTS names run, or all: checks float64 steps generate kernels others summary sanitizer.
# FOLDER (else $OUT, else ./nvidia-records) receives the records; it must hold none yet. The other flags are those of
# `mlx_zip bench nvidia`.
# It needs Python with torch, triton, numpy, cffi, safetensors and transformers, and mlx_zip: installed, or as wheels in the
# folder $WHEELS, of which those are taken that fit. With pytest it also tests the kernels. $PYTHON names the Python.
# Every part is bounded by a timeout; a part that fails or runs out of time is named at the end, and the others still run.
# All together get $WHOLE seconds (525): late parts get what early ones leave, and the summary always gets its time. The
# sanitizer comes last and may be cut: then it is not named.
# --cpu-rehearsal runs every part at tiny sizes on the CPU, so that only the device's own branches are left untried.
set -uo pipefail

fail() { # fail MESSAGE...
    echo "error: $*" >&2
    exit 2
}

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
rehearsal=0 folder= others= flags=() scale=1
while [ $# -gt 0 ]; do
    case $1 in
        --cpu-rehearsal) rehearsal=1 ;;
        --code | --tokenizer | --published | --engines)
            [ $# -gt 1 ] || fail "$1 needs a value"
            value=("$2")
            if [ "$1" = --engines ]; then
                read -ra value <<<"$2"
                others=$(printf '%s\n' "${value[@]}" | grep -v '^torch-' | tr '\n' ' ')
            elif [ -e "$2" ]; then
                value=("$(realpath "$2")") # the parts run in another folder
            fi
            flags+=("$1" "${value[@]}")
            shift
            ;;
        -*) fail "unknown flag $1" ;;
        *)
            [ -z "$folder" ] || fail "two folders are named: $folder and $1"
            folder=$1
            ;;
    esac
    shift
done
names=(checks float64 steps generate kernels others summary sanitizer)
whole=${WHOLE:-525} last=25 # seconds of all parts, and those kept for the summary
[[ $whole =~ ^[0-9]+$ ]] || fail "WHOLE: $whole is no number of seconds"
for name in ${PARTS:-}; do
    [[ " ${names[*]} " == *" $name "* ]] || fail "PARTS: $name is not one of ${names[*]}"
done
folder=${folder:-${OUT:-nvidia-records}}
mkdir -p "$folder" 2>/dev/null && [ -w "$folder" ] || fail "$folder is no folder that can be written to"
folder=$(cd "$folder" && pwd)
scratch=$(mktemp -d 2>/dev/null) || fail "there is no folder for temporary files: name one with TMPDIR"
trap 'rm -rf "$scratch"' EXIT
if compgen -G "$folder/*.jsonl" >/dev/null; then
    fail "$folder holds records of an earlier run: name another folder"
fi
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$scratch/triton}

if [ -n "${WHEELS:-}" ]; then
    compgen -G "$WHEELS/*.whl" >/dev/null || fail "WHEELS: there is no wheel in $WHEELS"
    wheels=$(cd "$WHEELS" && pwd)
    packages=$(cd "$WHEELS" && printf '%s\n' *.whl | cut -d- -f1 | sort -u) # of several wheels pip takes the one that fits
    # shellcheck disable=SC2086
    timeout 90 "$python" -m pip install -q --no-index --find-links "$wheels" --no-deps --no-compile --target "$scratch/site" \
        $packages >"$scratch/pip" 2>&1 || fail "pip cannot install the wheels: $(grep -m 1 ERROR "$scratch/pip" || tail -n 1 "$scratch/pip")"
    export PYTHONPATH=$scratch/site${PYTHONPATH:+:$PYTHONPATH}
fi
cd "$scratch" || exit 2 # so that the checkout's own folder does not hide what is installed
if ! timeout 120 "$python" -c 'import torch, triton, cffi, safetensors, transformers, mlx_zip.codec, mlx_zip.bench.gpu.nvidia' \
    >"$scratch/import" 2>&1; then
    fail "$python cannot import what is needed ($(tail -n 1 "$scratch/import")); install it, or name wheels with WHEELS=FOLDER"
fi
command -v cc gcc clang >/dev/null || echo "note: no C compiler is found here; Triton may need one for its first launch" >&2
if [ $rehearsal = 1 ]; then
    flags+=(--rehearse)
    scale=12 # a CPU, perhaps a busy one
    export CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1
elif ! timeout 60 "$python" -c 'import torch; torch.zeros(1, device="cuda").item()' >"$scratch/card" 2>&1; then
    fail "torch finds no CUDA card ($(tail -n 1 "$scratch/card")); --cpu-rehearsal runs every part on the CPU"
elif [[ "${TRITON_INTERPRET:-0}" != 0 ]]; then
    fail "TRITON_INTERPRET is set: Triton's interpreter measures nothing; unset it"
else
    export TRITON_INTERPRET=0 # the tests look for a card in /dev, where not every machine shows it
fi

child=
interrupted() {
    [ -z "$child" ] || kill "$child" 2>/dev/null && wait "$child" 2>/dev/null
    echo "interrupted; no target was judged" >&2
    exit 130
}
trap interrupted INT TERM

failed=()
part() { # part NAME SECONDS COMMAND...: runs a command for at most SECONDS; shows and keeps what it prints
    local name=$1 limit=$((scale * $2)) begun=$SECONDS status ended shown left reserved=1
    shift 2
    case $name in summary | sanitizer) reserved=0 ;; esac
    [[ " ${PARTS:-$name} " == *" $name "* ]] || return 0
    left=$((scale * (whole - (last * reserved)) - SECONDS))
    if [ "$left" -lt 5 ]; then
        echo "== $name: not run (no time is left)"
        [ "$name" = sanitizer ] || failed+=("$name")
        return 0
    fi
    [ "$limit" -le "$left" ] || limit=$left
    echo "== $name (at most $limit s)"
    : >"$folder/$name.log"
    timeout -k 5 "$limit" "$@" >"$folder/$name.log" 2>&1 &
    child=$!
    tail -n +1 -f -s 0.1 --pid="$child" "$folder/$name.log" &
    shown=$!
    wait "$child"
    status=$?
    child=
    wait "$shown"
    case $status in 124 | 137) ended="out of time" ;; *) ended="exit status $status" ;; esac
    echo "-- $name: $ended after $((SECONDS - begun)) s"
    [ "$status" = 0 ] || [ "$name $ended" = "sanitizer out of time" ] || failed+=("$name")
}
bench() { # bench PART SECONDS
    part "$1" "$2" "$python" -m mlx_zip.bench nvidia --out "$folder" ${flags[@]+"${flags[@]}"} --parts "$1"
}

{ timeout 20 "$python" -m torch.utils.collect_env || true; } >"$folder/environment.txt" 2>&1
bench checks 60
# kernels against float64, with fresh inputs, poisoned outputs and guarded borders
tests=(test_head test_matvec test_decode_attention test_embedding test_encoder test_install test_activations test_rope
    test_unpack)
[ $rehearsal = 1 ] && tests=(test_embedding)
several=() # every test compiles kernels of its own
[ $rehearsal = 0 ] && "$python" -c 'import xdist' 2>/dev/null && several=(-n 8)
files=("${tests[@]/#/$root/tests/cuda/kernels/}")
files=("${files[@]/%/.py}")
pytest=(-m pytest -q -p no:cacheprovider --rootdir "$root" -c "$root/pyproject.toml" -o "pythonpath=$root/tests")
untested=
"$python" -c 'import pytest' 2>/dev/null || untested="pytest is not installed"
[ -e "${files[0]}" ] || untested="the tests are not in $root"
if [ -z "$untested" ]; then
    part float64 120 "$python" "${pytest[@]}" ${several[@]+"${several[@]}"} "${files[@]}"
else
    echo "== float64: not run ($untested)"
fi
bench steps 90
bench generate 110
bench kernels 50
[ -z "$others" ] || bench others 110
bench summary 20
# last and optional: it gets what is left, and a run without it is whole
[ $rehearsal = 0 ] || untested="no GPU"
command -v compute-sanitizer >/dev/null || untested=${untested:-compute-sanitizer is not installed}
if [ -z "$untested" ]; then
    # each tensor gets memory of its own, so that a read beyond it is seen; what PyTorch asks the driver for may fail
    part sanitizer 40 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --report-api-errors no --error-exitcode 9 \
        "$python" "${pytest[@]}" -x "$root/tests/cuda/kernels/test_embedding.py"
else
    echo "== sanitizer: not run ($untested)"
fi

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed or out of time: ${failed[*]}"
    exit 1
fi
echo "every part ran; records in $folder, after $SECONDS s"
