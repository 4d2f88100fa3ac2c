#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How ft behaves on a machine that is not its own: quotas, busy cores, idling, memory, signals, full disks, refused io.
# What is measured is printed; the bounds are those of a collapse, because other work may run beside the test.
# Arguments: ft, ft-graph or none, data directory, and one group to run it alone. A part that is not possible here
# says why and is skipped.
set -u
ft=$(realpath "$1")
graph=$2
[ -x "$graph" ] && graph=$(realpath "$graph")
data=$(realpath "$3")
tiny=$data/ft-tiny
work=$(mktemp -d "${TMPDIR:-/tmp}/ft-e2e-machine-XXXXXX") || exit 1
started=() # processes that must not outlive the test
groups=()  # cgroups that were made
mounts=()

clean() {
    local each
    for each in "${started[@]}"; do
        kill -CONT "$each" 2>/dev/null
        kill -KILL "$each" 2>/dev/null
    done
    for each in "${groups[@]}"; do rmdir "$each" 2>/dev/null; done
    for each in "${mounts[@]}"; do umount "$each" 2>/dev/null; done
    rm -rf "$work"
}
trap clean EXIT
cd "$work" || exit 1
failures=0
checks=0
# A prompt that goes on, so that decode speed means something. The shell's $'...' gives it its line breaks.
long=$'Genesis 1\n\n1 In'
cores=$(nproc)

fail() {
    failures=$((failures + 1))
    printf 'FAIL %s\n' "$*"
    [ -s err ] && sed 's/^/    stderr: /' err | head -5
}

skip() {
    printf 'skip %s\n' "$*"
}

measured() {
    printf '     %s\n' "$*"
}

# holds TEXT A OP B: a comparison of numbers with fractions.
holds() {
    checks=$((checks + 1))
    awk -v a="$2" -v b="$4" "BEGIN { exit !(a != \"\" && b != \"\" && a + 0 $3 b + 0) }" || fail "$1: $2 is not $3 $4"
}

same() { # what wanted found
    checks=$((checks + 1))
    [ "$2" = "$3" ] || fail "$1: wanted \"$2\", found \"$3\""
}

ratio() {
    awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", (b > 0 ? a / b : 0) }'
}

json_number() { # KEY FILE: the last number with that key
    sed -n "s/^ *\"$1\": \([0-9.eE+-]*\),\{0,1\}$/\1/p" "$2" | tail -n 1
}

# Best of three, because other work may run beside the test. Sets $speed.
measure_speed() { # COMMAND...: what comes before the options of ft
    local now i
    speed=0
    for i in 1 2 3; do
        "$@" >json 2>err </dev/null || fail "exit code $?: $*"
        now=$(json_number decode_tok_s json)
        speed=$(awk -v a="$speed" -v b="${now:-0}" 'BEGIN { print (a + 0 > b + 0 ? a : b) }')
    done
}

run_long=(run --quiet --json --model "$tiny" --max-tokens 200 --temperature 0)

# ---- cores ----

# Makes a cgroup of one core's time: path in $quota; false when that is not possible here.
make_quota() {
    local base
    for base in /sys/fs/cgroup/cpu /sys/fs/cgroup/cpu,cpuacct; do
        [ -f "$base/cpu.cfs_quota_us" ] || continue
        mkdir "$base/ft-e2e-$$" || continue
        quota=$base/ft-e2e-$$
        groups+=("$quota")
        echo 100000 >"$quota/cpu.cfs_period_us" && echo 100000 >"$quota/cpu.cfs_quota_us" && return 0
    done 2>/dev/null
    base=/sys/fs/cgroup
    if grep -qw cpu $base/cgroup.controllers && { grep -qw cpu $base/cgroup.subtree_control ||
        echo +cpu >$base/cgroup.subtree_control; } && mkdir "$base/ft-e2e-$$"; then
        quota=$base/ft-e2e-$$
        groups+=("$quota")
        echo "100000 100000" >"$quota/cpu.max" && return 0
    fi 2>/dev/null
    return 1
}

in_quota() {
    bash -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' bash "$quota" "$@"
}

# Under a limit of one core the plan's choice is as fast as one worker. More workers are refused; the host device is
# the way to have more threads (worker, device, link, io) than cores: they must not wait for each other spinning.
one_core() { # NAME COMMAND...
    local name=$1 chosen single hybrid
    shift
    "$@" "$ft" plan --json --model "$tiny" >json 2>err || fail "$name: plan"
    same "$name: workers" 1 "$(json_number workers json)"
    measure_speed "$@" "$ft" "${run_long[@]}" "$long"
    chosen=$speed
    measure_speed "$@" "$ft" "${run_long[@]}" --workers 1 "$long"
    single=$speed
    measure_speed "$ft" "${run_long[@]}" --strategy hybrid --moe-cache-size 64 "$long"
    hybrid=$speed
    measure_speed "$@" "$ft" "${run_long[@]}" --strategy hybrid --moe-cache-size 64 "$long"
    measured "$name: $chosen tok/s as planned, $single with --workers 1, ratio $(ratio "$chosen" "$single");" \
        "hybrid $speed, $hybrid without the limit, ratio $(ratio "$speed" "$hybrid")"
    holds "$name: as planned" "$(ratio "$chosen" "$single")" '>=' 0.6
    holds "$name: hybrid" "$(ratio "$speed" "$hybrid")" '>=' 0.15
    "$@" "$ft" run --model "$tiny" --workers 2 hi >out 2>err
    same "$name: two workers are refused" 2 $?
}

cpu_quota() {
    if [ "$cores" -lt 2 ]; then
        skip "cpu_quota: only one core is visible"
    elif ! make_quota; then
        skip "cpu_quota: no cgroup with a CPU quota may be made here"
    else
        one_core "quota of 1 core" in_quota
        "$ft" plan --model "$tiny" >whole.txt
        in_quota "$ft" plan --model "$tiny" >limited 2>err
        measured "$(grep '^machine' limited | cut -c 1-140)"
        checks=$((checks + 1))
        cmp -s whole.txt limited && fail "the plan does not name the quota"
    fi
}

affinity() {
    local first
    if [ "$cores" -lt 2 ]; then
        skip "affinity: only one core is visible"
        return
    fi
    first=$(taskset -cp $$ | sed 's/.*: \([0-9]*\).*/\1/')
    one_core "one core by affinity" taskset -c "$first"
}

# Somebody else spins on one of the cores.
busy_core() {
    local first alone spinner
    first=$(taskset -cp $$ | sed 's/.*: \([0-9]*\).*/\1/')
    measure_speed "$ft" "${run_long[@]}" "$long"
    alone=$speed
    taskset -c "$first" bash -c 'while :; do :; done' &
    spinner=$!
    started+=("$spinner")
    measure_speed "$ft" "${run_long[@]}" "$long"
    kill $spinner
    wait $spinner 2>/dev/null
    measured "a spinning process on core $first of $cores: $speed tok/s, $alone alone, ratio $(ratio "$speed" "$alone")"
    holds "beside a spinning process" "$(ratio "$speed" "$alone")" '>=' 0.25
}

# ---- idle ----

cpu_ns() { # PID: of all its threads
    local task total=0 ns rest
    for task in /proc/"$1"/task/*/schedstat; do
        read -r ns rest <"$task" || return
        total=$((total + ns))
    done 2>/dev/null
    echo $total
}

cpu_ticks() { # PID: utime + stime
    sed 's/^.*) //' "/proc/$1/stat" | cut -d ' ' -f 12,13 | tr ' ' + | bc 2>/dev/null ||
        sed 's/^.*) //' "/proc/$1/stat" | awk '{ print $12 + $13 }'
}

wait_for() { # SECONDS COMMAND...
    local i tries=$(($1 * 20))
    shift
    for ((i = 0; i < tries; i++)); do
        "$@" && return 0
        sleep 0.05
    done
    return 1
}

prompts_seen() { # COUNT
    [ "$(tr '\r' '\n' <screen 2>/dev/null | grep -c '^> ')" -ge "$1" ]
}

# A chat that waits for a line uses no CPU: neither before the first message nor after an answer.
idle_chat() { # NAME OPTIONS...
    local name=$1 pid before after ticks_before ticks_after console
    shift
    rm -f keys pid
    : >screen
    mkfifo keys
    printf 'echo $$ >pid; exec "%s" run --quiet --model "%s" %s' "$ft" "$tiny" "$*" >start.sh
    script -qefc "bash start.sh" screen <keys >/dev/null 2>err &
    console=$!
    started+=("$console")
    exec 7>keys
    if ! wait_for 30 prompts_seen 1; then
        fail "$name: no prompt came"
        exec 7>&-
        return
    fi
    pid=$(cat pid)
    started+=("$pid")
    printf 'Hello!\n' >&7
    wait_for 30 prompts_seen 2 || fail "$name: no answer came"
    sleep 0.5
    before=$(cpu_ns "$pid")
    ticks_before=$(cpu_ticks "$pid")
    sleep 3
    after=$(cpu_ns "$pid")
    ticks_after=$(cpu_ticks "$pid")
    local ms
    ms=$(awk -v a="$before" -v b="$after" 'BEGIN { printf "%.2f", (b - a) / 1e6 }')
    measured "idle chat, $name: $ms ms of CPU in 3 s ($((ticks_after - ticks_before)) ticks)"
    holds "$name: ms of CPU in 3 s" "$ms" '<' 30
    holds "$name: ticks in 3 s" $((ticks_after - ticks_before)) '<=' $(($(getconf CLK_TCK) * 3 / 100))
    printf '/exit\n' >&7
    exec 7>&-
    wait $console
    same "$name: exit code" 0 $?
}

idle() {
    if ! command -v script >/dev/null; then
        skip "idle: no script(1) to play a terminal"
        return
    fi
    idle_chat cpu --strategy cpu
    idle_chat hybrid --strategy hybrid --moe-cache-size 40
    idle_chat pread --strategy offload --io pread
}

# ---- memory ----

pool_bytes() { # FILE POOL...: sum of these pools in a plan
    local file=$1
    shift
    tr -d ' \n' <"$file" | grep -o '{"pool":"[a-z]*","tier":"[a-z]*","bytes":[0-9]*' |
        awk -F '[":,]+' -v want=" $* " 'index(want, " " $3 " ") { sum += $7 } END { printf "%d", sum }'
}

# Until process $pid is gone its peak is read again and again into $peak: it only grows.
watch_peak() { # NAME
    local now
    peak=0
    while now=$(sed -n 's/^VmHWM:[^0-9]*\([0-9]*\) kB/\1/p' /proc/$pid/status 2>/dev/null) && [ -n "$now" ]; do
        peak=$((now > peak ? now : peak))
        sleep 0.01
    done
    wait $pid || fail "$1: exit code $?"
}

peak_memory() { # NAME OPTIONS...
    local name=$1 pid peak planned slots bound
    shift
    "$ft" plan --json --model "$tiny" "$@" >json 2>err || fail "$name: plan"
    planned=$(pool_bytes json dense embed head bank kv state)
    slots=$(pool_bytes json slots staging)
    "$ft" "${run_long[@]}" "$@" "$long" >out 2>err &
    pid=$!
    started+=("$pid")
    watch_peak "$name"
    bound=$(((planned + slots) / 1024 + 64 * 1024))
    measured "$name: peak $peak KiB; weights, state and KV $((planned / 1024)) KiB, slots and staging" \
        "$((slots / 1024)) KiB; $((peak - (planned + slots) / 1024)) KiB beyond them"
    holds "$name: peak KiB" $peak '>' 1000
    holds "$name: peak KiB" $peak '<=' $bound
    # Slots and staging of a model this small fit into the 64 MiB as well.
    holds "$name: peak KiB without counting slots" $peak '<=' $((planned / 1024 + 64 * 1024))
}

memory() {
    peak_memory cpu --strategy cpu
    peak_memory offload --strategy offload --moe-cache-size 64
    peak_memory hybrid --strategy hybrid --moe-cache-size 64
    unused_pages
}

# A request takes the pages for all that it may write, and touches those that it writes.
unused_pages() {
    "$ft" run --quiet --model "$tiny" --temperature 0 --max-tokens 200000 "$long" >out 2>err &
    local pid=$! peak
    started+=("$pid")
    watch_peak "200000 tokens at most"
    measured "200000 tokens at most: peak $peak KiB"
    holds "peak KiB of a short answer of 200000 tokens at most" $peak '>' 1000
    holds "peak KiB of a short answer of 200000 tokens at most" $peak '<=' $((128 * 1024))
}

# ---- signals ----

# About 20 ms a token: long enough to be met in the middle.
slow=(run --quiet --model "$tiny" --strategy offload --moe-cache-size 40 --link-gbs 0.02 --temperature 0)

# A background job of a script ignores SIGINT from birth; one of a shell with job control does not. Sets $pid.
start_slow() {
    rm -f out
    set -m
    "$ft" "${slow[@]}" --max-tokens "$1" "$long" >out 2>err &
    pid=$!
    set +m
    started+=("$pid")
    wait_for 20 test -s out || fail "no text came"
}

is_gone() {
    ! kill -0 "$1" 2>/dev/null || grep -q '^State:[[:space:]]*Z' "/proc/$1/status" 2>/dev/null
}

now_ms() {
    date +%s%3N
}

signals() {
    local pid number code begin took whole wanted
    "$ft" "${slow[@]}" --link-gbs 10 --max-tokens 300 "$long" >whole 2>err || fail "the undisturbed text"
    whole=$(cat whole)
    for number in INT TERM; do
        wanted=$([ $number = INT ] && echo 130 || echo 143)
        start_slow 1000
        sleep 0.3
        begin=$(now_ms)
        kill -$number $pid
        wait_for 20 is_gone $pid
        took=$(($(now_ms) - begin))
        wait $pid
        code=$?
        measured "SIG$number: ended after $took ms with code $code, $(wc -c <out) bytes of text kept"
        holds "SIG$number: ms to the end" $took '<' 2000
        same "SIG$number: exit code" "$wanted" $code
        same "SIG$number: stderr" "ft: interrupted" "$(cat err)"
        checks=$((checks + 1))
        case $whole in
        "$(cat out)"*) ;;
        *) fail "SIG$number: the partial text is not a beginning of the whole: $(head -c 200 out)" ;;
        esac
    done
    start_slow 60
    local i
    for i in 1 2 3; do
        kill -STOP $pid
        sleep 0.7
        kill -CONT $pid
        sleep 0.1
    done
    wait $pid
    same "stopped and continued: exit code" 0 $?
    "$ft" "${slow[@]}" --link-gbs 10 --max-tokens 60 "$long" >whole 2>err
    same "stopped and continued: text" "$(cat whole)" "$(cat out)"
}

# ---- disks ----

one_line() { # NAME CODE TEXT: of the last command, with its stderr in err
    same "$1: exit code" "$2" "$code"
    checks=$((checks + 1))
    if [ "$(wc -l <err)" != 1 ] || ! grep -q '^ft: ' err || ! grep -qF -- "$3" err; then
        fail "$1: wanted one line with \"$3\""
    fi
}

full_disk() {
    local code want
    want=$("$ft" run --quiet --model "$tiny" --max-tokens 60 "$long")
    if [ -w /dev/full ]; then
        "$ft" run --quiet --model "$tiny" --max-tokens 60 --trace /dev/full "$long" >out 2>err
        code=$?
        one_line "trace to /dev/full" 1 'No space left'
        same "trace to /dev/full: text" "$want" "$(cat out)"
        "$ft" logits --quiet --model "$tiny" --ids 1,2,3 --out /dev/full >out 2>err
        code=$?
        one_line "logits to /dev/full" 1 '/dev/full'
    fi
    mkdir small
    if ! mount -t tmpfs -o size=256k none small 2>/dev/null; then
        skip "full_disk: no small file system may be mounted here"
        return
    fi
    mounts+=("$work/small")
    "$ft" run --quiet --model "$tiny" --max-tokens 60 --trace small/trace "$long" >out 2>err
    code=$?
    one_line "trace on a full disk" 1 'No space left'
    same "trace on a full disk: text" "$want" "$(cat out)"
    measured "$(cat err)"
    if [ -x "$graph" ]; then
        checks=$((checks + 1))
        "$graph" dump --trace small/trace >out 2>err || fail "what fitted of the trace cannot be read"
    fi
    rm -f small/trace
    "$ft" logits --quiet --model "$tiny" --ids "$(seq -s , 1 64)" --out small/logits >out 2>err
    code=$?
    one_line "logits on a full disk" 1 'small/logits'
    measured "$(cat err)"
    same "logits on a full disk: nothing half-made" "" "$(ls small)"
}

# io_uring refused by environment, and a file system in memory: the same text. (Refusal by seccomp: test_jobs_step.)
slow_io() {
    local want=' thereof shall be surely put to death for the moon and in the darkness.' dir
    same "pread" "$want" "$("$ft" run --quiet --model "$tiny" --io pread 'In the beginning' 2>err)"
    same "FT_IO_BACKEND=pread" "$want" "$(FT_IO_BACKEND=pread "$ft" run --model "$tiny" 'In the beginning' 2>err)"
    checks=$((checks + 1))
    grep -q '^ft: note: .*pread' err || fail "no note about pread"
    mkdir memory
    if ! mount -t ramfs none memory 2>/dev/null; then
        skip "slow_io: no ramfs (a file system without O_DIRECT) may be mounted here"
        return
    fi
    mounts+=("$work/memory")
    cp -r "$tiny" memory/ft-tiny
    dir=memory/ft-tiny
    same "without O_DIRECT" "$want" "$("$ft" run --model $dir 'In the beginning' 2>err)"
    checks=$((checks + 1))
    grep -q '^ft: note: .*O_DIRECT' err || fail "no note about O_DIRECT"
    measured "$(grep -m 1 '^ft: note' err | cut -c 1-150)"
}

# Nobody reads any more: the rest is not computed, and nothing is said.
closed_pipe() {
    local begin took
    begin=$(now_ms)
    timeout 60 "$ft" "${slow[@]}" --max-tokens 1000 "$long" 2>err | head -c 1 >out
    local codes=("${PIPESTATUS[@]}")
    took=$(($(now_ms) - begin))
    measured "closed pipe: ended after $took ms with code ${codes[0]}"
    holds "closed pipe: ms" $took '<' 10000
    same "closed pipe: exit code" 1 "${codes[0]}"
    same "closed pipe: stderr" "" "$(cat err)"
}

for group in cpu_quota affinity busy_core idle memory signals full_disk slow_io closed_pipe; do
    case " ${4:-$group} " in *" $group "*) ;; *) continue ;; esac
    before=$failures
    $group
    [ "$before" = "$failures" ] && printf 'ok   %s\n' $group
done
printf '%d checks, %d failed\n' $checks $failures
[ $failures = 0 ] && [ $checks -gt 0 ]
