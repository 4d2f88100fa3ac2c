#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs on a machine with a GPU: kernel tests, the lane end to end, and short benchmarks, from a build made elsewhere.
# usage: tests/gpu_check.sh BUILD_DIR DATA_DIR [STEP...]   steps: kernels lane decode kernels_cpu
set -u
build=$1
export FT_REQUIRE_GPU=1 FT_DEMO_MODEL=$2/ft-tiny
shift 2
steps=${*:-kernels lane decode}
failed=0
run() {
    local begin=$SECONDS
    echo "== $*"
    timeout 240 "$@" 2>&1 | tail -n "${LINES_KEPT:-25}"
    local status=${PIPESTATUS[0]}
    echo "-- status $status, $((SECONDS - begin)) s"
    [ "$status" = 0 ] || failed=1
}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
for step in $steps; do
    case $step in
    kernels) for test in "$build"/test_kernels_cuda_*_gpu; do LINES_KEPT=15 run "$test"; done ;;
    lane) run "$build/gpu_lane_gpu"; run "$build/gpu_slices_gpu" ;;
    decode) run "$build/ft" bench decode --shape qwen3.8-flash-next --layers 4 --device cuda --moe-cache-rate 0.152 --compare ;;
    kernels_cpu) LINES_KEPT=120 run "$build/ft" bench kernels ;;
    *) echo "no step $step" && exit 2 ;;
    esac
done
exit $failed
