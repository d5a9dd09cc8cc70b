#!/bin/bash
# Speed on one GPU, one line after the other and nothing beside them: 330 s. See correctness.sh for the arguments.
cd "$(dirname "$0")/../.." || exit 2
. tests/gpu/lines.sh "$@"
line 150 gpt2 "$python" -m tests.benchmarks.bench_gpt2 --out "$out/gpt2" --rounds 5 --budget-s 140 $tiny
line 110 llama_slice "$python" -m tests.benchmarks.bench_llama8b --out "$out/llama_slice" --no-save --rounds 2 \
    --only "layers, none" "layers, alternate" "layers, full" $tiny
line 45 llama_whole "$python" -m tests.benchmarks.bench_llama8b --out "$out/llama_whole" --no-save --rounds 2 \
    --only "whole, bfloat16 parameters, full" --local-size 1 $tiny
line 25 small_step "$python" -m tests.gpu --out "$out/small_step" --only small_step --budget-s "$left_s" $device
finish
