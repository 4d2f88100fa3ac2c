#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The command line from outside: answers, JSON, exit codes and messages. Arguments: ft, ft-graph, data directory.
set -u
ft=$(realpath "$1")
graph=$2
[ -x "$graph" ] && graph=$(realpath "$graph")
data=$(realpath "$3")
tiny=$data/ft-tiny
work=$(mktemp -d "${TMPDIR:-/tmp}/ft-e2e-cli-XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
failures=0
checks=0

fail() {
    failures=$((failures + 1))
    printf 'FAIL %s\n' "$*"
    sed 's/^/    stderr: /' err | head -5
}

# expect CODE TEXT COMMAND...: the exit code, and TEXT on stdout or stderr (in out, err).
expect() {
    local code=$1 text=$2 got
    shift 2
    checks=$((checks + 1))
    "$@" >out 2>err
    got=$?
    if [ "$got" != "$code" ]; then
        fail "exit code $got, wanted $code: $*"
    elif [ -n "$text" ] && ! cat out err | grep -qF -- "$text"; then
        fail "no \"$text\": $*"
    fi
}

# refuse CODE TEXT COMMAND...: as expect, and what is said is one line "ft: ...".
refuse() {
    expect "$@"
    checks=$((checks + 1))
    if [ "$(wc -l <err)" != 1 ] || ! grep -q '^ft: ' err; then
        fail "wanted one line \"ft: ...\": ${*:3}"
    fi
}

is_json() {
    checks=$((checks + 1))
    if command -v python3 >/dev/null && ! python3 -m json.tool <"$1" >/dev/null 2>&1; then
        fail "not JSON: $2"
    fi
}

same() { # what wanted found
    checks=$((checks + 1))
    [ "$2" = "$3" ] || fail "$1: wanted \"$2\", found \"$3\""
}

answers() {
    expect 0 '' "$ft" run --quiet --model "$tiny" "In the beginning"
    same continuation " thereof shall be surely put to death for the moon and in the darkness." "$(cat out)"
    expect 0 '' "$ft" run --quiet --model "$tiny" --chat "What is 12 plus 30?"
    same answer "12 plus 30 is 42." "$(cat out)"
    expect 0 'tok/s' "$ft" run --model "$tiny" --chat --prompt "What is 77 minus 19?" --prompt "What is 12 plus 30?"
    same "two answers" $'77 minus 19 is 58.\n\n12 plus 30 is 42.' "$(cat out)"
    expect 0 '' "$ft" run --quiet --model "$tiny" --special-tokens \
        $'<|im_start|>user\nWhat is 12 plus 30?<|im_end|>\n<|im_start|>assistant\n'
    same "special tokens" "12 plus 30 is 42." "$(cat out)"
    printf 'In the beginning\n' >prompt
    expect 0 '' "$ft" run --quiet --model "$tiny" --max-tokens 3 <prompt
    same "stdin" " thereof shall be" "$(cat out)"
    expect 0 '' "$ft" run --quiet --model "$tiny" --stop " the moon" "In the beginning"
    same "stop string" " thereof shall be surely put to death for" "$(cat out)"
    head -c 9000 /dev/zero | tr '\0' '7' >prompt
    expect 0 'max_position_embeddings' "$ft" run --model "$tiny" --max-tokens 1 <prompt
    expect 0 'using the demo model' "$ft" run --max-tokens 1 hi
    expect 0 '' env FT_DEMO_MODEL="$tiny" "$ft" run --quiet --max-tokens 1 hi
}

# A small pool of slots and a slow link change the time, never the text.
strategies() {
    local strategy
    for strategy in auto cpu offload hybrid fused; do
        expect 0 '' "$ft" run --quiet --model "$tiny" --strategy $strategy --chat "What is 12 plus 30?"
        same "$strategy" "12 plus 30 is 42." "$(cat out)"
    done
    expect 0 '' "$ft" run --quiet --model "$tiny" --strategy hybrid --moe-cache-size 40 --hybrid-share 0.5 --workers 1 \
        --link-gbs 2 --link-delay-us 50 --chunk 5 --io pread --ple-backend ram --no-pin --chat "What is 12 plus 30?"
    same "every option" "12 plus 30 is 42." "$(cat out)"
    expect 0 '' "$ft" run --quiet --model "$tiny" --isa ref --chat "What is 12 plus 30?"
    same "reference kernels" "12 plus 30 is 42." "$(cat out)"
}

sampling() {
    local options=(--quiet --model "$tiny" --temperature 1.2 --top-k 50 --top-p 0.95 --min-p 0.01 --seed 7
        --max-tokens 20) first
    expect 0 '' "$ft" run "${options[@]}" "In the beginning"
    first=$(cat out)
    expect 0 '' "$ft" run "${options[@]}" "In the beginning"
    same "same seed" "$first" "$(cat out)"
    expect 0 '' "$ft" run "${options[@]}" --prompt "In the beginning" --prompt "Genesis 1"
    same "same seed in a batch" "$first" "$(head -n "$(wc -l <<<"$first")" out)"
}

traces() {
    local options=(--quiet --model "$tiny" --strategy offload --moe-cache-size 40 --max-tokens 20)
    expect 0 '' "$ft" run "${options[@]}" --trace trace "In the beginning"
    same "trace magic" FTTRACE1 "$(head -c 8 trace)"
    cp out first
    expect 0 '' "$ft" run "${options[@]}" --replay trace "In the beginning"
    same replay "$(cat first)" "$(cat out)"
    expect 0 'replay  every choice as recorded' "$ft" run "${options[@]:1}" --replay trace "In the beginning"
    expect 0 ' choices were not as recorded' "$ft" run "${options[@]:1}" --replay trace "Genesis 1"
    refuse 1 'not a trace file' "$ft" run "${options[@]}" --replay first hi
    # A plan without staging buffers cannot repeat what a prefill fetched: the CPU computes it instead.
    expect 0 ' choices were not as recorded' "$ft" run --model "$tiny" --device host --strategy cpu --replay trace "In the beginning"
    same 'replay on the CPU' "$(cat first)" "$(cat out)"
    refuse 2 '--look-ahead on does not go with --replay' "$ft" run "${options[@]}" --replay trace --look-ahead on hi
    refuse 2 '--look-ahead on does not go with --deterministic' "$ft" run --model "$tiny" --device host --strategy hybrid --deterministic --look-ahead on hi
    refuse 2 '--look-ahead on does not go with --device none' "$ft" run --model "$tiny" --device none --look-ahead on hi
    refuse 1 'No such file' "$ft" run "${options[@]}" --trace "$work/no/such" hi
    refuse 1 'File too large' bash -c 'ulimit -f 1 && exec "$@"' bash "$ft" run "${options[@]}" --trace small hi
    if [ -w /dev/full ]; then
        refuse 1 'No space left' "$ft" run "${options[@]}" --trace /dev/full hi
        same "text in spite of the trace" "$("$ft" run "${options[@]}" hi)" "$(cat out)"
    fi
}

fixtures() {
    local dir
    for dir in "$data"/fixtures/*/; do
        [ -f "$dir/reference.safetensors" ] || continue
        expect 0 'ok' "$ft" verify --quiet --model "$dir"
    done
    expect 0 '14 of 14 prompts equal' "$ft" verify --quiet --model "$tiny"
    expect 0 '"ok": true' "$ft" verify --quiet --json --model "$data/fixtures/gpt_oss-mxfp4"
    is_json out verify
    # A tolerance that nothing meets: the first layer with an error is named.
    expect 1 'first departure: layer' "$ft" verify --quiet --tol 1e-12 --model "$data/fixtures/qwen4_exp-bf16"
    # Another model's reference.
    refuse 1 'for this model' "$ft" verify --quiet --model "$data/fixtures/qwen3_moe-bf16" \
        --reference "$data/fixtures/qwen4_exp-bf16/reference.safetensors"
    refuse 1 'has neither' "$ft" verify --quiet --model "$data/fixtures/tokenizers"
}

logits() {
    local dir=$data/fixtures/qwen4_exp-bf16
    expect 0 '"tokens": 64' "$ft" logits --json --model "$dir" --ids "$dir/reference.safetensors" --out o.safetensors --hidden
    is_json out logits
    if command -v python3 >/dev/null; then
        expect 0 'within tolerance' python3 "$data/../compare_logits.py" o.safetensors "$dir/reference.safetensors"
    fi
    expect 0 '' "$ft" logits --quiet --model "$dir" --ids 1,2,3 --out p.safetensors --strategy offload
    echo '[1, 2, 3]' >ids
    expect 0 '' "$ft" logits --quiet --model "$dir" --ids ids --out q.safetensors --strategy offload
    checks=$((checks + 1))
    cmp -s p.safetensors q.safetensors || fail "ids from a file give other logits"
    # ulimit -f: half a file is a failed write, not a signal.
    refuse 1 'File too large' bash -c 'ulimit -f 1 && exec "$@"' bash "$ft" logits --quiet --model "$dir" --ids 1 --out r.safetensors
    refuse 2 'neither a list of ids' "$ft" logits --quiet --model "$dir" --ids 1,x --out r.safetensors
    refuse 2 '99999' "$ft" logits --quiet --model "$dir" --ids 1,99999 --out r.safetensors
    refuse 1 'r.safetensors' "$ft" logits --quiet --model "$dir" --ids 1 --out no/r.safetensors
    refuse 1 'not a regular file' "$ft" logits --quiet --model "$dir" --ids 1 --out /dev/full
    refuse 2 '--ids' "$ft" logits --model "$dir"
    same "nothing half-made" "" "$(ls | grep '^r\.')"
}

plans() {
    expect 0 'fits' "$ft" plan --model "$tiny"
    expect 0 '"fits": true' "$ft" plan --json --model "$tiny"
    is_json out plan
    expect 1 'does not fit' "$ft" plan --model "$tiny" --ram 8M
    refuse 1 'does not fit' "$ft" run --quiet --model "$tiny" --ram 8M hi
    # The smallest GPU is that of the plan above it, which has lowered its KV tokens to fit.
    expect 0 'fits' "$ft" plan --shape qwen3.8-flash-next --ram 128G --device cuda --vram 9000M
    local tokens=$(sed -n 's/^sizes .* \([0-9]*\) KV tokens.*/\1/p' out)
    checks=$((checks + 1))
    [ -n "$tokens" ] && [ "$tokens" -lt 8192 ] && grep -q "^smallest GPU for $tokens KV tokens: 8\.[0-9]* GiB free" out ||
        fail "the smallest GPU is not for the plan's $tokens KV tokens"
    expect 0 '"smallest_gpu"' "$ft" plan --json --model "$tiny"
    expect 0 'fp8, quantised at load' "$ft" plan --model "$tiny" --dense fp8
    refuse 1 '--dense fp8' "$ft" run --quiet --model "$tiny" --dense fp8 hi
    refuse 2 'bf16' "$ft" plan --model "$tiny" --dense int8
    expect 0 'fits' "$ft" plan --shape qwen3.8-flash-next --ram 128G --device cuda --vram 12G --strategy offload
    expect 1 'does not fit' "$ft" plan --shape qwen3.8-flash-next --ram 128G --device cuda --vram 6G --strategy offload
    expect 0 ' GiB of 24.00 GiB' "$ft" plan --shape qwen3.8-flash-next --ram 128G --device cuda --vram 12G,24G
    expect 0 '25-47' "$ft" plan --shape qwen3.8-flash-next --ram 128G --gpus 5,3 --vram 12G
    expect 1 'GiB of GPU 3 (layers 47 to 47) and 1.37 GiB are usable' "$ft" plan --shape qwen3.8-flash-next --ram 128G --gpus 5,3 --vram 24G,1400M
    same "the other order would fit" 1 "$(grep -c 'of GPU 3 (layers 47 to 47) .* GPU 5 last, where the head is: --gpus 3,5 with --vram in that order' out)"
    expect 0 'fits' "$ft" plan --shape qwen3.8-flash-next --ram 128G --gpus 3,5 --vram 1400M,24G
    refuse 2 'names GPU 5 twice' "$ft" plan --shape qwen3.8-flash-next --gpus 5,1,5 --vram 12G
    refuse 2 'names 2 limits, for as many GPUs, but the plan is for --device none' "$ft" plan --shape qwen3.8-flash-next --device none --vram 12G,8G
    refuse 2 'at most 32 GPUs' "$ft" plan --shape qwen3.8-flash-next --device cuda --vram "$(printf '12G,%.0s' $(seq 32))12G" --ram 96G
    refuse 2 'names 3 limits for 2 GPUs' "$ft" plan --shape qwen3.8-flash-next --gpus 5,1 --vram 12G,8G,4G
    refuse 2 'names GPUs and --device host' "$ft" plan --shape qwen3.8-flash-next --gpus 5,1 --device host
    expect 0 'fits' "$ft" plan --shape qwen3.8-flash-next --ram 128G --device cuda --vram 6G --strategy offload --dense fp8
    refuse 2 '--shape' "$ft" plan --model "$tiny" --shape qwen3.8-flash-next
    expect 0 '4608 experts in 36 layers, mxfp4' "$ft" plan --shape gpt-oss-120b --ram 128G --device cuda --vram 24G
    expect 0 '4608 experts in 36 layers, nvfp4' "$ft" plan --shape gpt-oss-120b --ram 128G --device cuda --vram 24G --format nvfp4
    mkdir -p folder
    mkfifo pipe
    refuse 1 'folder: is a directory' "$ft" plan --shape folder
    refuse 1 'pipe: is a pipe' timeout 20 "$ft" plan --shape ./pipe
    refuse 1 '/dev/null: is a device' "$ft" plan --shape /dev/null
    refuse 1 'none.json: cannot be opened: No such file' "$ft" plan --shape ./none.json
}

tokenizers() {
    printf 'Hello <|im_end|> w\303\266rld' >text
    expect 0 '[' "$ft" tokenize --model "$tiny" <text
    is_json out tokenize
    cp out ids
    expect 0 '' "$ft" tokenize --model "$tiny" --decode <ids
    checks=$((checks + 1))
    cmp -s out text || fail "decode of encode is another text"
    expect 0 ', 2,' "$ft" tokenize --model "$tiny" --special-tokens <text
    expect 0 '[' "$ft" tokenize --model "$data/fixtures/tokenizers/llama3" <text
    refuse 2 'not a token id' "$ft" tokenize --decode --model "$tiny" <text
}

benches() {
    expect 0 'ns_per_steal' "$ft" bench jobs --json --rounds 1 --steps 5
    is_json out "bench jobs"
    expect 0 '"records_share"' "$ft" bench jobs --json --rounds 1 --steps 5 --layers 3 --trace-share --trace-steps 4
    is_json out "bench jobs with the trace's share"
    expect 0 'ceiling_gbs' "$ft" bench kernels --json --rounds 1 --bank 4M --hidden 256 --width 128
    is_json out "bench kernels"
    expect 0 'read GB/s' "$ft" bench kernels --rounds 2 --bank 4M --hidden 256 --width 128 --op expert --format bf16 --rows 4
    expect 0 '"max_error"' "$ft" bench kernels --json --rounds 1 --bank 4M --hidden 256 --width 128 --op mix_up
    is_json out "bench kernels --op"
    refuse 2 'ops are expert, matmul' "$ft" bench kernels --rounds 1 --bank 4M --op matmull
    refuse 2 'no ISA is called "avx99"' "$ft" bench kernels --rounds 1 --bank 4M --isa avx2,avx99
    refuse 2 'no kernel of op mix_up, format mxfp4' "$ft" bench kernels --rounds 1 --bank 4M --op mix_up --format mxfp4
    expect 0 'times_ceiling' "$ft" bench kernels --json --rounds 1 --bank 4M --step --steps 8 --model "$tiny"
    is_json out "bench kernels --step"
    expect 0 'x that' "$ft" bench kernels --rounds 1 --bank 4M --step --steps 4 --shape "$data/fixtures/qwen4_exp-bf16/config.json" --format mxfp4
    expect 0 '"gbs"' "$ft" bench load --json --rounds 1 --model "$tiny"
    is_json out "bench load"
    expect 0 'batch_us_p50' "$ft" bench ple --json --batches 20 --steps 50 --bytes 32M --file table
    is_json out "bench ple"
    same "created file is removed" "" "$(ls | grep '^table$')"
    expect 0 'batch_us_p50' "$ft" bench ple --json --batches 20 --steps 50 --bytes 32M --file table2 --model "$tiny"
    refuse 2 'did you mean jobs' "$ft" bench jbs
    refuse 2 'at least' "$ft" bench ple --json --batches 5 --bytes 1M --file table
    expect 0 '"steps": 1,' "$ft" bench ple --json --batches 5 --steps 1 --bytes 32M --file table
    same "a table of an impossible size is not made" "" "$(ls | grep '^table$')"
}

bad_input() {
    refuse 2 'the prompt is empty' "$ft" run --quiet --model "$tiny" ""
    refuse 2 'the prompt is empty' "$ft" run --quiet --model "$tiny" </dev/null
    refuse 1 'No such file' "$ft" run --quiet --model no-such-model hi
    refuse 1 'not a directory' "$ft" run --quiet --model "$tiny/config.json" hi
    mkdir -p empty
    refuse 1 'tokenizer.json' "$ft" run --quiet --model empty hi
    refuse 1 'config.json' "$ft" plan --model empty
    refuse 2 'did you mean --temperature?' "$ft" run --temprature 1 hi
    refuse 2 'did you mean run' "$ft" runn
    refuse 2 'none of' "$ft" run --strategy fast hi
    refuse 2 'sse9' env FT_ISA=sse9 "$ft" run --quiet --model "$tiny" hi
    local isa shape=$data/fixtures/qwen4_exp-bf16/config.json
    for isa in '' sse9; do
        refuse 2 "${isa:---isa}" "$ft" run --quiet --model "$tiny" --isa "$isa" hi
        refuse 2 "${isa:---isa}" "$ft" plan --model "$tiny" --isa "$isa"
        refuse 2 "${isa:---isa}" "$ft" plan --shape "$shape" --isa "$isa"
        refuse 2 "${isa:---isa}" "$ft" verify --model "$tiny" --isa "$isa"
        refuse 2 "${isa:---isa}" "$ft" logits --model "$tiny" --ids 1 --out isa.safetensors --isa "$isa"
        refuse 2 "${isa:---isa}" "$ft" bench decode --shape "$shape" --steps 1 --isa "$isa"
        refuse 2 "${isa:-no ISA}" "$ft" bench kernels --bank 4M --isa "$isa"
        refuse 2 "${isa:---isa}" "$ft" bench kernels --bank 4M --step --steps 4 --shape "$shape" --isa "$isa"
    done
    refuse 2 'sse9' env FT_ISA=sse9 "$ft" plan --model "$tiny"
    expect 0 'fits' "$ft" plan --model "$tiny" --isa avx512amx # of another machine, perhaps
    refuse 2 'needs a value' "$ft" run --model
    refuse 2 'give one of them' "$ft" run --quiet --model "$tiny" --strategy offload --moe-cache-size 40 --moe-cache-rate 0.5 hi
    refuse 2 'no device' "$ft" run --quiet --model "$tiny" --strategy cpu --moe-cache-size 40 hi
    refuse 2 'no device' "$ft" plan --model "$tiny" --strategy cpu --moe-cache-rate 0.5
    refuse 2 'no device' "$ft" plan --model "$tiny" --vram 12G
    refuse 2 '--handshake is how a GPU step' "$ft" run --quiet --model "$tiny" --device host --handshake kernel hi
    refuse 2 '--handshake is how a GPU step' "$ft" plan --model "$tiny" --device none --handshake memop
    refuse 2 "--format is that of a shape's experts" "$ft" plan --model "$tiny" --format bf16
    refuse 2 '--moe-cache-rate 0: experts are fetched' "$ft" plan --model "$tiny" --device host --strategy offload --moe-cache-rate 0
    expect 0 'fits' "$ft" plan --model "$tiny" --device none --handshake auto
    expect 0 'fits' "$ft" plan --model "$tiny" --device cuda --vram 12G --handshake kernel
    refuse 2 '--hybrid-share is the share of the misses' "$ft" run --quiet --model "$tiny" --strategy offload --hybrid-share 0.5 hi
    refuse 2 'the strategy is cpu: give --strategy hybrid' "$ft" plan --model "$tiny" --strategy cpu --hybrid-share 0.5
    expect 0 'fits' "$ft" plan --model "$tiny" --strategy hybrid --hybrid-share 0
    expect 0 'fits' "$ft" plan --model "$tiny" --strategy hybrid --vram 12G --ram 32G
    refuse 1 '--max-tokens 4000000000: 1 sequence of 4000000002 tokens' "$ft" run --quiet --model "$tiny" --max-tokens 4000000000 hi
    refuse 1 'a KV pool of 8589934592 tokens' "$ft" run --quiet --model "$tiny" --max-tokens 4294967294 --prompt hi --prompt hi
    refuse 1 'want a KV pool of 4294967296 tokens' "$ft" run --quiet --model "$tiny" --kv-tokens 64 --max-tokens 4294967294 hi
    refuse 1 'the prompt and --max-tokens want a KV pool of 900000066 tokens' "$ft" run --quiet --model "$tiny" --max-tokens 900000000 --ram 64M hi
    refuse 2 'too large (at most 4294967294)' "$ft" run --quiet --model "$tiny" --max-tokens 4294967295 hi
    refuse 1 '--kv-tokens' "$ft" run --quiet --model "$tiny" --kv-tokens 64 --sequences 1 --max-tokens 100 "In the beginning"
    refuse 2 '--chat' "$ft" run --quiet --model "$tiny" --system x hi
    expect 2 'usage' "$ft"
    expect 0 'usage' "$ft" --help
    expect 0 '[default: 0.0001]' "$ft" verify --help
    expect 0 'ft ' "$ft" --version
}

streams() {
    checks=$((checks + 3))
    "$ft" run --quiet --model "$tiny" "Genesis 1" 2>err | head -c 1 >out
    [ "${PIPESTATUS[0]}" = 1 ] && [ ! -s err ] || fail "a closed pipe must end quietly with 1"
    if [ -w /dev/full ]; then
        "$ft" run --quiet --model "$tiny" hi >/dev/full 2>err
        [ $? = 1 ] && grep -q '^ft: standard output: No space' err || fail "a full stdout must be an error"
    fi
    "$ft" run --quiet --model "$tiny" hi >&- 2>err
    [ $? = 1 ] && grep -q '^ft: standard output: ' err || fail "a closed stdout must be an error"
}

# In the middle of a run: partial text stays, the summary comes, the trace is whole, and the exit code says which
# signal it was. A background job of a script ignores SIGINT from birth, so the program is started through a shell
# that does not.
interrupt_with() { # SIGNAL CODE
    checks=$((checks + 1))
    : >out # what is left in it would let us send the signal before the program is there
    set -m
    "$ft" run --model "$tiny" --strategy offload --moe-cache-size 40 --link-gbs 0.02 --max-tokens 3000 --trace cut \
        "Genesis 1" >out 2>err &
    local pid=$! i
    set +m
    for i in $(seq 200); do
        [ -s out ] && break
        sleep 0.05
    done
    kill -"$1" $pid
    wait $pid
    local code=$?
    [ $code = "$2" ] && [ -s out ] && grep -q '^decode' err && grep -q '^ft: interrupted' err || fail "SIG$1: exit code $code"
    [ ! -x "$graph" ] || expect 0 'waited for' "$graph" dump --trace cut
}

interrupts() {
    interrupt_with INT 130
    interrupt_with TERM 143
    interrupt_with HUP 129 # the terminal was closed
    # nohup: a SIGHUP that is ignored stays ignored.
    checks=$((checks + 1))
    : >out
    (trap '' HUP && exec "$ft" run --quiet --model "$tiny" --strategy offload --moe-cache-size 40 --link-gbs 0.02 \
        --max-tokens 40 "Genesis 1") >out 2>err &
    local pid=$! i
    for i in $(seq 200); do
        [ -s out ] && break
        sleep 0.05
    done
    kill -HUP $pid
    wait $pid || fail "SIGHUP under nohup: exit code $?"
    # A measurement that would take hours ends at the first signal.
    checks=$((checks + 1))
    timeout -s TERM -k 20 1 "$ft" bench jobs --rounds 1000000 >out 2>err
    same "bench jobs, SIGTERM" 124 $?
}

# A conversation on a terminal: several turns, /reset, Ctrl-C at the prompt.
chat() {
    command -v python3 >/dev/null || return
    cat >talk.py <<'PYTHON'
import os, pty, select, sys, time
pid, fd = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], sys.argv[1:])
def until_prompt(end):
    text, limit = b"", time.time() + 60
    while not text.endswith(end) and time.time() < limit:
        if select.select([fd], [], [], 0.1)[0]:
            try:
                part = os.read(fd, 4096)
            except OSError:
                break
            if not part:
                break
            text += part
    sys.stdout.write(text.decode(errors="replace"))
until_prompt(b"> ")
for line in ["What is the symbol for gold?", "What is 12 plus 30?", "/reset", "/help", "Hello!", "\x03", "/exit"]:
    os.write(fd, line.encode() if line == "\x03" else line.encode() + b"\n")
    until_prompt(b"> " if line != "/exit" else b"no end")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
PYTHON
    expect 0 '12 plus 30 is 42.' python3 talk.py "$ft" run --model "$tiny"
    local text
    for text in 'The symbol for gold is Au.' '(forgotten)' 'Ctrl-C again or /exit leaves' 'from a snapshot\|first token after'; do
        checks=$((checks + 1))
        grep -q -- "$text" out || fail "chat: no \"$text\""
    done
}

for group in answers chat strategies sampling traces fixtures logits plans tokenizers benches bad_input streams interrupts; do
    [ $# -lt 4 ] || [ "$4" = $group ] || continue
    before=$failures
    $group
    [ "$before" = "$failures" ] && printf 'ok   %s\n' $group
done
printf '%d checks, %d failed\n' $checks $failures
[ $failures = 0 ] && [ $checks -gt 0 ]
