# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by demo.sh and test.sh: finds out which system packages the build lacks and installs them with apt-get.
#
#     ft_install_deps        what every build needs
#     ft_install_deps fuzz   and what the fuzz preset needs (clang with its run-time library)
#
# Expects the root of the checkout as working directory; writes build/log/apt.log. Returns 1 after a message that
# names the packages to install by hand. When nothing is missing it calls neither apt-get nor sudo. What a package
# brings is looked for, not the package, so that a self-built library or a cmake from elsewhere counts as well.

FT_CMAKE_VERSION_MIN=3.25

ft_deps_cmake_version() { cmake --version 2>/dev/null | sed -nE '1s/^cmake version ([0-9.]+).*/\1/p'; }

ft_deps_has_cmake() {
    local version
    version=$(ft_deps_cmake_version)
    [ -n "$version" ] && printf '%s\n' "$FT_CMAKE_VERSION_MIN" "$version" | sort --version-sort --check=quiet
}

# A compiler without the C library's headers is as good as none, so a program is built. Arguments: compiler, flags.
ft_deps_compiles() {
    local status
    mkdir -p build/log && printf '%s\n' "$FT_DEPS_PROGRAM" >build/log/probe.c || return 1
    "$@" build/log/probe.c -o build/log/probe >/dev/null 2>&1
    status=$?
    rm -f build/log/probe build/log/probe.c
    return $status
}
ft_deps_has_cc() {
    local FT_DEPS_PROGRAM='#include <stdio.h>
int main(void) { return puts("") < 0; }'
    ft_deps_compiles "${CC:-cc}"
}
ft_deps_has_cxx() {
    printf '#include <functional>\nint main() { return 0; }\n' | "${CXX:-c++}" -x c++ -std=c++17 -fsyntax-only - >/dev/null 2>&1
}
ft_deps_has_clang_fuzzer() {
    local FT_DEPS_PROGRAM='#include <stdint.h>
#include <stdlib.h>
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) { return bytes && count > SIZE_MAX / 2; }'
    ft_deps_compiles clang -fsanitize=fuzzer,address,undefined
}

# Prints a line for everything that is missing: the packages that bring it | what it is for.
ft_deps_find_missing() {
    local name packages why
    ft_deps_has_cc || echo "gcc libc6-dev|C compiler"
    ft_deps_has_cxx || echo "g++|C++ compiler: tests run the GPU kernels on the CPU"
    ft_deps_has_cmake || echo "cmake|build system, $FT_CMAKE_VERSION_MIN or newer"
    command -v ninja >/dev/null || echo "ninja-build|runs the build"
    while read -r name packages why; do
        if ! pkg-config --exists "$name" 2>/dev/null; then echo "$packages|$why"; fi
    done <<'END'
liburing liburing-dev disk reads (io_uring)
hwloc libhwloc-dev cores and caches of the machine
ck libck-dev rings between threads
jansson libjansson-dev JSON
libpcre2-8 libpcre2-dev tokenizer patterns
libutf8proc libutf8proc-dev Unicode normal forms
END
    command -v pkg-config >/dev/null || echo "pkgconf|finds the libraries"
    if [ "${1-}" = fuzz ] && ! ft_deps_has_clang_fuzzer; then
        echo "clang libclang-rt-$(ft_deps_clang_major)-dev|fuzz targets (libFuzzer)"
    fi
}

# Major version of the clang that is here or that apt-get would bring.
ft_deps_clang_major() {
    local major
    major=$(clang --version 2>/dev/null | sed -nE 's/.*clang version ([0-9]+).*/\1/p')
    [ -n "$major" ] || major=$(apt-cache depends clang 2>/dev/null | sed -nE 's/.*Depends: clang-([0-9]+)$/\1/p')
    echo "${major:-VERSION}" | head -n 1
}

# The packages of ft_deps_find_missing's lines, as words.
ft_deps_packages() { cut -d '|' -f 1 <<<"$1" | paste -s -d ' '; }

# The message for everything that ends without packages. Arguments: reason, missing lines.
ft_deps_give_up() {
    {
        echo
        echo "Cannot install what is missing: $1."
        echo "Install it by hand and run this again. On Debian 12, Ubuntu 24.04 and newer:"
        echo
        echo "    apt-get install $(ft_deps_packages "$2")"
        echo
        echo "(Ubuntu has some of them in its universe component. Other systems use similar names, often -devel for -dev.)"
    } >&2
}

# Prints the words to put before a command that needs root; fails when there is no way to become root.
ft_deps_root_prefix() {
    [ "$(id -u)" = 0 ] && return 0
    command -v sudo >/dev/null || return 1
    # A password can only be asked for where somebody sits.
    if sudo -n true 2>/dev/null; then echo "sudo -n"; elif [ -t 2 ] && [ "${CI-}" = "" ]; then echo sudo; else return 1; fi
}

ft_deps_apt_get() {
    # shellcheck disable=SC2086 # the prefix is words
    $FT_DEPS_ROOT env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 \
        -o Dpkg::Use-Pty=0 "$@" </dev/null >>build/log/apt.log 2>&1
}

ft_install_deps() {
    local missing still packages FT_DEPS_ROOT
    missing=$(ft_deps_find_missing "${1-}")
    [ -z "$missing" ] && return 0
    echo "Missing system packages:"
    while IFS='|' read -r packages still; do printf '    %-32s %s\n' "$packages" "$still"; done <<<"$missing"
    command -v apt-get >/dev/null || { ft_deps_give_up "there is no apt-get here" "$missing" && return 1; }
    FT_DEPS_ROOT=$(ft_deps_root_prefix) ||
        { ft_deps_give_up "you are not root, and sudo is not here or asks for a password" "$missing" && return 1; }
    echo "Installing them with ${FT_DEPS_ROOT:+sudo }apt-get (log: build/log/apt.log)"
    : >build/log/apt.log
    ft_deps_apt_get update || echo "apt-get update failed; trying with the package lists that are here" >&2
    # Only now is it known which version of clang there is to be had.
    missing=$(ft_deps_find_missing "${1-}")
    # shellcheck disable=SC2046 # package names are words
    if ! ft_deps_apt_get install --no-install-recommends $(ft_deps_packages "$missing"); then
        tail -n 15 build/log/apt.log >&2
        ft_deps_give_up "apt-get failed (no network?), its last lines are above" "$missing"
        return 1
    fi
    hash -r
    still=$(ft_deps_find_missing "${1-}")
    [ -z "$still" ] && return 0
    if command -v cmake >/dev/null && ! ft_deps_has_cmake; then
        echo "$(command -v cmake) is version $(ft_deps_cmake_version); $FT_CMAKE_VERSION_MIN or newer is needed." >&2
    fi
    ft_deps_give_up "apt-get reported success, but this is still not found (hidden by something earlier in PATH?)" "$still"
    return 1
}
