#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Follows the README on a clean system: run it before a release. Needs root, debootstrap, git and a package mirror.
#
#     tests/clean_clone.sh SUITE WORKDIR [ARGUMENT of tools/test.sh]...
#     tests/clean_clone.sh bookworm /var/tmp/ft-clean
#     MIRROR=http://mirror/ubuntu COMPONENTS=main,universe tests/clean_clone.sh noble /var/tmp/ft-clean --all
#
# It makes a minimal SUITE in WORKDIR (kept as base-SUITE for the next time; remove it to start afresh), copies it to
# WORKDIR/root, clones the HEAD of this checkout into it and runs there, in a mount and process namespace of its own:
#
#   as root            tools/test.sh twice, tools/demo.sh twice: the second runs must install and compile nothing
#   as a user          the same demo from a fresh copy: sudo without password, a checkout path with a space, another
#                      working directory, a home that cannot be written, stdin closed
#   as a user          without sudo: must end with the names of the packages and change nothing
#
# Packages come from where this machine's apt takes SUITE (the first source that has it, else MIRROR, else the mirror
# of this machine's own release); apt's proxy settings and the keyrings are copied along. FT_SKIP_DEMO=1 leaves out
# the demo's run (it still builds). WORKDIR/log/ keeps what the runs printed. Exit status 0: all as promised.
set -u -o pipefail

die() {
    echo "clean_clone: $*" >&2
    exit 1
}
[ $# -ge 2 ] || { sed -n '3,20s/^# \{0,1\}//p' "$0" && exit 2; }
suite=$1
mkdir -p "$2/log" || exit 1
work=$(cd "$2" && pwd -P) || exit 1
shift 2
[ "$(id -u)" = 0 ] || die "needs root (chroot and mounts)"
for tool in debootstrap git unshare; do command -v $tool >/dev/null || die "needs $tool"; done
repo=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P) || exit 1
case $work/ in "$repo"/*) die "WORKDIR must lie outside the checkout" ;; esac
base=$work/base-$suite
root=$work/root
components=${COMPONENTS-main}

# The mirrors of this machine's apt that have suite $1.
mirrors_of() { apt-get update --print-uris 2>/dev/null | sed -n "s|^'\(.*\)/dists/$1/\(In\)\{0,1\}Release' .*|\1|p"; }

make_base() {
    local mirror=${MIRROR-} own
    own=$(. /etc/os-release && echo "${VERSION_CODENAME-}")
    [ -n "$mirror" ] || mirror=$(mirrors_of "$suite" | head -n 1)
    [ -n "$mirror" ] || mirror=$(mirrors_of "$own" | head -n 1)
    [ -n "$mirror" ] || die "no mirror for $suite is configured; set MIRROR"
    local script=() # a suite that debootstrap does not know: all Ubuntu releases share one script
    if ! [ -e "/usr/share/debootstrap/scripts/$suite" ]; then
        case $mirror in *ubuntu*) script=(/usr/share/debootstrap/scripts/gutsy) ;; *) script=(/usr/share/debootstrap/scripts/sid) ;; esac
    fi
    rm -rf --one-file-system "$base" "$base.part"
    # debootstrap has a variable COMPONENTS of its own, which ours must not reach.
    env -u COMPONENTS debootstrap --variant=minbase --components="$components" "$suite" "$base.part" "$mirror" \
        ${script[@]+"${script[@]}"} >"$work/log/debootstrap.log" 2>&1 ||
        { tail -n 5 "$work/log/debootstrap.log" >&2 && die "debootstrap $suite failed"; }
    if [ "$suite" = "$own" ] && [ -z "${MIRROR-}" ]; then
        # Security and update pockets too, as this machine has them.
        rm -f "$base.part/etc/apt/sources.list"
        cp -a /etc/apt/sources.list /etc/apt/sources.list.d "$base.part/etc/apt/" 2>/dev/null
        mkdir -p "$base.part/usr/share/keyrings" "$base.part/etc/apt/keyrings"
        cp -a /usr/share/keyrings/. "$base.part/usr/share/keyrings/"
        cp -a /etc/apt/keyrings/. "$base.part/etc/apt/keyrings/" 2>/dev/null
    fi
    apt-config dump | grep -E '^Acquire::(https?|ftp|Check-Valid-Until|Check-Date|Retries)\b' >"$base.part/etc/apt/apt.conf.d/99host"
    mv "$base.part" "$base"
}

# A fresh system with the checkout at $1. What was mounted into the last one died with its namespace.
make_root() {
    rm -rf --one-file-system "$root"
    cp -a "$base" "$root" || die "cannot copy $base"
    cp -L /etc/resolv.conf /etc/hosts "$root/etc/" 2>/dev/null
    mkdir -p "$(dirname "$root$1")"
    git clone --quiet --no-hardlinks "$repo" "$root$1" || die "cannot clone $repo"
}

# Runs a shell command line in the system, with an environment as after login.
# shellcheck disable=SC2016 # the inner shell expands
in_root() {
    unshare --mount --pid --fork --kill-child --propagation private bash -c '
        mount -t proc proc "$1/proc" && mount --rbind /sys "$1/sys" && mount --rbind /dev "$1/dev" || exit 125
        exec chroot "$1" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
            ${http_proxy+http_proxy="$http_proxy"} ${https_proxy+https_proxy="$https_proxy"} bash -c "$2"' in_root "$root" "$1"
}

problems=0
problem() {
    echo "clean_clone: WRONG: $*" >&2
    problems=$((problems + 1))
}

# Arguments: name of the run, wanted exit status, command line. Leaves its duration in run_s.
run() {
    local begin=$SECONDS status
    in_root "$3" >"$work/log/$1.log" 2>&1 </dev/null
    status=$?
    run_s=$((SECONDS - begin))
    printf '  %-24s status %d, %4d s\n' "$1" $status $run_s
    [ $status = "$2" ] || { tail -n 25 "$work/log/$1.log" >&2 && problem "$1: status $status, wanted $2"; }
}

# The second run of $1 in the checkout at $2, after a first one: no package, nothing compiled.
check_second() {
    if grep -q 'apt-get' "$work/log/$1.log"; then problem "$1 called apt-get"; fi
    grep -q 'no work to do' "$root$2/build/log/release.log" || problem "$1 compiled again"
}

demo=tools/demo.sh
# The build is the demo's first half and the same for both.
[ -z "${FT_SKIP_DEMO-}" ] || demo='bash -c ". tools/install_deps.sh; . tools/build_preset.sh; ft_install_deps && ft_build_preset release"'

[ -d "$base" ] || make_base
echo "$suite, commit $(git -C "$repo" rev-parse --short HEAD), as root:"
make_root /root/ft
run test-first 0 "cd /root/ft && tools/test.sh $*"
run test-second 0 "cd /root/ft && tools/test.sh $*"
check_second test-second /root/ft
run demo-after-test 0 "cd /root/ft && $demo"
rm -rf "$root/root/ft/build"
run demo-first 0 "cd /root/ft && $demo"
run demo-second 0 "cd /root/ft && $demo"
check_second demo-second /root/ft
[ "$run_s" -le 30 ] || problem "the second demo took $run_s s"

echo "$suite, as a user:"
checkout="/srv/of a user/ft"
make_root "$checkout"
run user-setup 0 "useradd --no-create-home --home-dir /home/guest guest && install -d -m 555 /home/guest &&
    chown -R guest '$checkout'"
as_guest='setpriv --reuid guest --regid guest --init-groups env HOME=/home/guest USER=guest'
run user-no-sudo 1 "cd / && $as_guest '$checkout/tools/demo.sh' <&-"
grep -q 'apt-get install .*liburing-dev' "$work/log/user-no-sudo.log" || problem "user-no-sudo names no packages"
run user-get-sudo 0 "apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends sudo &&
    echo 'guest ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/guest && rm -rf /var/lib/apt/lists/*"
if [ -n "${FT_SKIP_DEMO-}" ]; then user_demo="cd '$checkout' && $as_guest $demo <&-"; else user_demo="cd / && $as_guest '$checkout/tools/demo.sh' <&-"; fi
run user-demo-first 0 "$user_demo"
run user-demo-second 0 "$user_demo"
check_second user-demo-second "$checkout"
[ -z "$(find "$root/home/guest" -mindepth 1)" ] || problem "something was written to the user's home"

[ $problems = 0 ] || die "$problems things went wrong; logs in $work/log"
rm -rf --one-file-system "$root"
echo "clean_clone: all as the README says"
