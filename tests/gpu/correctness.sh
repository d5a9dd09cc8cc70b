#!/bin/bash
# What only NCCL between ranks can show, and what a save costs: 430 s on one GPU. The most valuable line comes first, and
# one that hangs costs its own time alone.
#
#     bash tests/gpu/correctness.sh OUT                   # one GPU, which the ranks share
#     bash tests/gpu/correctness.sh OUT --device cpu      # tries every line; its figures count for nothing
cd "$(dirname "$0")/../.." || exit 2
. tests/gpu/lines.sh "$@"
export GPU_TESTS_SHARE=1
line 25 probe env NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$out/nccl.%p" "$python" -m tests.gpu.multi.probe groups "$out/probe.json"
line 200 several_ranks "$python" -m pytest -q -p no:cacheprovider -n 3 $of_pytest tests/gpu/multi
line 20 bf16_sanitized env $sanitizer "$python" -m tests.gpu.multi.probe bf16 "$out/bf16_sanitized.json"
line 20 bf16_poisoned "$python" -m tests.gpu.multi.probe bf16 "$out/bf16_poisoned.json"
# Nothing runs beside these.
line 110 save_overlaps "$python" -m tests.gpu --out "$out/save_overlaps" --only save_overlaps --budget-s "$left_s" $device
line 43 loss "$python" -m tests.gpu --out "$out/loss" --only loss --budget-s "$left_s" $device
finish
