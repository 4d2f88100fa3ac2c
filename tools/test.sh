#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds and tests. Everything asked for is run, even after a failure.
set -u -o pipefail
usage='usage: tools/test.sh [--all | STEP...]

Installs missing system packages, builds and runs the tests. Without arguments: release asan.

  release   preset release: labels unit and e2e
  asan      preset asan (AddressSanitizer, UBSan): label unit; e2e too with --all
  tsan      preset tsan (ThreadSanitizer): unit and e2e
  tiny      preset tiny (rings of 2, one slot, 4 KiB arenas): unit and e2e
  stress    preset release: label stress
  fuzz      preset fuzz (clang): every fuzz target for FT_FUZZ_SECONDS (60) seconds
  bench     ft bench, printed; no time is too slow to pass

  --all     all of these        --help    this text

Build output is in build/log/, what a fuzz target choked on in build/fuzz/artifacts/. Exit status: 0 when
everything passed, 1 when something failed, 2 for a wrong argument.'

steps_all="release asan tsan tiny stress fuzz bench"
steps="release asan"
asan_labels="unit"
case ${1-} in
-h | --help) printf '%s\n' "$usage" && exit 0 ;;
--all) steps=$steps_all asan_labels="unit|e2e" && shift ;;
?*) steps=$* && shift $# ;;
esac
for step in ${1+"$1"} $steps; do
    case " $steps_all " in *" $step "*) ;; *) echo "tools/test.sh: there is no step $step; --help lists them" >&2 && exit 2 ;; esac
done

cd -P -- "$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)" || exit 2
. tools/install_deps.sh
. tools/build_preset.sh
exec </dev/null

jobs=$(nproc 2>/dev/null || echo 2)
# UBSan only prints unless it is told to stop. The sanitizers of gcc 12/13 and clang 14-17 cannot place their shadow
# memory under the strong address randomisation of newer kernels, so they run without any where that is allowed.
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=second_deadlock_stack=1
fixed_addresses=()
if setarch -R true 2>/dev/null; then fixed_addresses=(setarch -R); fi

# Arguments: preset, labels (a regular expression).
run_ctest() {
    local prefix=()
    case $1 in asan | tsan) prefix=(${fixed_addresses[@]+"${fixed_addresses[@]}"}) ;; esac
    ft_build_preset "$1" || return 1
    ${prefix[@]+"${prefix[@]}"} ctest --test-dir "build/$1" -L "^($2)\$" -j "$jobs" --output-on-failure --no-tests=error
}

# Argument: name of the target. seeds are read, new inputs and crashes stay under build/.
run_fuzz_target() {
    local name=$1 reader=${1#fuzz_} log=build/fuzz/log/$1.log status seeds=()
    mkdir -p "build/fuzz/corpus/$reader" build/fuzz/artifacts build/fuzz/log
    [ -d "tests/data/fuzz/$reader" ] && seeds=("tests/data/fuzz/$reader")
    ${fixed_addresses[@]+"${fixed_addresses[@]}"} "build/fuzz/tests/$name" -max_total_time="${FT_FUZZ_SECONDS:-60}" -timeout=20 \
        -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="build/fuzz/artifacts/$name-" \
        "build/fuzz/corpus/$reader" ${seeds[@]+"${seeds[@]}"} >"$log" 2>&1
    status=$?
    if [ $status = 0 ]; then
        echo "$name: $(sed -nE 's/^stat::number_of_executed_units: *//p' "$log") inputs, none bad (seeds: ${seeds[0]-none})"
    else
        tail -n 40 "$log"
        echo "$name: FAILED (status $status, log: $log)"
    fi
    return $status
}

run_fuzz() {
    local source count=0 running=0 failed=0
    ft_build_preset fuzz || return 1
    # Sources, not programs: the build folder may still hold a target that is no more.
    for source in tests/fuzz_*.c; do
        [ -e "$source" ] || continue
        if [ $running -ge "$jobs" ]; then
            wait -n || failed=1
            running=$((running - 1))
        fi
        run_fuzz_target "$(basename "$source" .c)" &
        running=$((running + 1)) count=$((count + 1))
    done
    while [ $running -gt 0 ]; do
        wait -n || failed=1
        running=$((running - 1))
    done
    [ $count -gt 0 ] || { echo "there are no fuzz targets" && return 1; }
    return $failed
}

# Numbers for a person to read.
run_bench() {
    local what failed=0
    ft_build_preset release || return 1
    for what in jobs kernels load ple; do
        printf '\nft bench %s\n' $what
        build/release/ft bench $what || failed=1
    done
    return $failed
}

run_step() {
    case $1 in
    release) run_ctest release "unit|e2e" ;;
    asan) run_ctest asan "$asan_labels" ;;
    tsan | tiny) run_ctest "$1" "unit|e2e" ;;
    stress) run_ctest release stress ;;
    fuzz) run_fuzz ;;
    bench) run_bench ;;
    esac
}

needs=''
case " $steps " in *" fuzz "*) needs=fuzz ;; esac
ft_install_deps $needs || exit 1
summary=''
failed=''
for step in $steps; do
    begin=$SECONDS
    printf '\n== %s\n' "$step"
    if run_step "$step"; then result=passed; else result=FAILED failed+=" $step"; fi
    summary+=$(printf '  %-8s %s  %4d s' "$step" "$result" $((SECONDS - begin)))$'\n'
done
printf '\n== summary\n%s' "$summary"
if [ -n "$failed" ]; then
    echo "tools/test.sh: failed:$failed"
    exit 1
fi
echo "tools/test.sh: everything passed in $SECONDS s"
