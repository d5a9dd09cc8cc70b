# Read by the scripts beside it: OUT and --device cpu, and `line SECONDS NAME COMMAND...`, which has a time-out of its own.
out=${1:?a folder for the results}
device=
tiny=
of_pytest="-m gpu"
sanitizer=TORCH_CUDA_SANITIZER=1
slower=1
if [ "${2:-} ${3:-}" = "--device cpu" ]; then
    device="--device cpu"
    tiny=--tiny
    of_pytest=
    # It needs a torch with CUDA.
    sanitizer=
    # A few shared cores take their time, also for small sizes.
    slower=${SLOWER:-6}
    export GPU_TESTS_ON_CPU=1 CUDA_VISIBLE_DEVICES=
fi
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
left_s=$((600 * slower))
python=${PYTHON:-python3}
failed=0
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# What one process has compiled the next one finds.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$out/inductor}"

line() {
    local limit_s=$(($1 * slower)) name=$2 began=$SECONDS code=0
    shift 2
    timeout --kill-after=5 "$limit_s" "$@" >"$out/$name.log" 2>&1 || code=$?
    [ "$code" = 0 ] || failed=1
    echo "$name: exit code $code after $((SECONDS - began)) s of $limit_s" | tee -a "$out/lines.txt"
}

finish() {
    echo "$SECONDS s in all; commit $(git describe --always --dirty 2>/dev/null)" | tee -a "$out/lines.txt"
    exit $failed
}
