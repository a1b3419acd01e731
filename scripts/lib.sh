# Sourced by the scripts: find a recent Python, and create a virtual environment with memguard, in which every other package
# has the version locked in requirements/constraints.txt (scripts/lock).

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV="$ROOT/.venv"
LOCK="$ROOT/requirements/constraints.txt"
LOCKED=(--constraint "$LOCK" --build-constraint "$LOCK")
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Many container images set this variable: each interpreter that the tests start would compile its whole framework again, and
# `import tensorflow` would take 11 s of a core instead of 4. Compiled files stay in our environments and __pycache__.
unset PYTHONDONTWRITEBYTECODE

say() { printf '%s\n' "$*" >&2; }

# Find the first Python >= 3.11 that can create virtual environments; PYTHON=... selects one.
find_python() {
    local candidate found=""
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue
        found=$candidate
        "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1 || continue
        printf '%s\n' "$candidate"
        return
    done
    if [ -n "$found" ]; then
        say "memguard: $found cannot create virtual environments (venv or ensurepip is missing)"
        say "    fix: install its venv package; on Debian and Ubuntu: apt-get install python3-venv"
    else
        say "memguard: Python 3.11 or newer is needed; ${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>/dev/null || echo missing)"
        say "    fix: install a newer Python, or select one: PYTHON=/path/to/python3.12 $0"
    fi
    return 1
}

# Hash of an installation's inputs: pyproject.toml, the lock, the Python version, and the files named as arguments.
fingerprint() {
    "$VENV/bin/python" - "$ROOT/pyproject.toml" "$LOCK" "$@" <<'PY'
import hashlib, sys
read = b"".join(open(path, "rb").read() for path in sys.argv[1:])
print(hashlib.sha256(read + sys.version.encode()).hexdigest())
PY
}

# Ensure that the virtual environment $VENV exists, with a pip that supports dependency groups and --build-constraint.
# (This and the next two functions are also called in conditions, where `set -e` does not apply: hence the returns.)
have_python() {
    local python
    if ! "$VENV/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        python=$(find_python) || return
        say "creating a virtual environment in $VENV"
        "$python" -m venv --clear "$VENV" || return
    fi
    have_pip
}

have_pip() {
    "$VENV/bin/python" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 3))' ||
        "$VENV/bin/python" -m pip install -qq --constraint "$LOCK" --upgrade pip >&2
}

# have_packages NAME ARGUMENT...: run `pip install ARGUMENT...` in $VENV, once per NAME and fingerprint.
# --no-compile: Python compiles a module at its first import, and few of the frameworks' modules are ever imported.
have_packages() {
    local stamp="$VENV/.memguard-$1" on=()
    shift
    [ "$1" != --editable ] || on=("$ROOT/memguard/__init__.py") # its metadata has the version that stands there
    if [ "$(cat "$stamp" 2>/dev/null || true)" != "$(fingerprint ${on[@]+"${on[@]}"})" ]; then
        say "installing into $VENV: $*"
        "$VENV/bin/python" -m pip install -qq --no-compile "${LOCKED[@]}" "$@" >&2 || return
        fingerprint ${on[@]+"${on[@]}"} >"$stamp"
    fi
}

# make_venv NAME ARGUMENT...: have_python and have_packages.
make_venv() {
    have_python && have_packages "$@"
}

# PyCUDA has no wheels and is built from its sdist. A machine without CUDA lacks CUDA's headers, which are taken from wheels,
# and libcuda, which a stub library of one function replaces. Needs g++. Low optimisation and no debug information halve
# the build time; no test measures PyCUDA's own speed.
CUDA_HEADERS=(nvidia-cuda-runtime nvidia-cuda-profiler-api)

# build_pycuda FOLDER: build PyCUDA's wheel in the folder, unless $VENV has PyCUDA. It uses only pip from $VENV, so that other
# packages can be installed at the same time. have_pycuda FOLDER: install the wheel.
build_pycuda() {
    local folder=$1
    ! has_pycuda || return 0
    say "building PyCUDA for $VENV: about a minute"
    mkdir "$folder" || return
    compile_pycuda "$folder" && return
    say "memguard: PyCUDA, which its tests need, failed to build"
    say "    fix: install g++ and Python's headers; on Debian and Ubuntu: apt-get install g++ python3-dev"
    return 1
}

have_pycuda() {
    ! has_pycuda || return 0
    "$VENV/bin/python" -m pip install -qq --no-compile "${LOCKED[@]}" "$1"/wheel/pycuda-*.whl >&2 || return
    fingerprint >"$VENV/.memguard-pycuda"
}

has_pycuda() {
    [ "$(cat "$VENV/.memguard-pycuda" 2>/dev/null || true)" = "$(fingerprint)" ]
}

compile_pycuda() {
    local folder=$1 source
    "$VENV/bin/python" -m pip install -qq --no-deps --target "$folder/cuda" "${LOCKED[@]}" \
        "${CUDA_HEADERS[@]}" >&2 || return
    "$VENV/bin/python" -m pip download -qq --no-deps --no-binary pycuda --dest "$folder" "${LOCKED[@]}" \
        pycuda >&2 || return
    tar xzf "$folder"/pycuda-*.tar.gz -C "$folder" || return
    source=$(dirname "$folder"/pycuda-*/setup.py)
    # With one function: a linker omits a library that provides no needed symbol.
    echo 'int cuInit(unsigned flags) { return (int)flags; }' >"$folder/cuda.c" || return
    "${CC:-cc}" -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$folder/libcuda.so" "$folder/cuda.c" || return
    printf '%s\n' "CUDA_INC_DIR = ['$folder/cuda/nvidia/cu13/include']" "CUDADRV_LIB_DIR = ['$folder']" \
        "CUDA_ENABLE_CURAND = False" "CXXFLAGS = ['-O1', '-g0']" >"$source/siteconf.py" || return
    "$VENV/bin/python" -m pip wheel -qq --no-deps --wheel-dir "$folder/wheel" "${LOCKED[@]}" "$source" >&2
}

# have_chromium: ensure that Debian's chromium and its driver are installed, for the browser tests.
have_chromium() {
    if command -v chromium >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1; then
        return 0
    fi
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing chromium and chromium-driver"
        apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
            chromium chromium-driver >&2 && return 0
    fi
    say "memguard: the tests of the report need a browser, but chromium or chromedriver is not on the PATH"
    say "    fix: as root, on Debian: apt-get install chromium chromium-driver"
    return 1
}

# have_tmux: ensure that tmux is installed, for the tests of the live screen.
have_tmux() {
    command -v tmux >/dev/null 2>&1 && return 0
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing tmux"
        apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
            tmux >&2 && return 0
    fi
    say "memguard: the tests of memguard top need tmux, which is not on the PATH"
    say "    fix: as root, on Debian: apt-get install tmux"
    return 1
}

# have_mpirun: ensure that Open MPI is installed, for the tests of ranks.
have_mpirun() {
    command -v mpirun >/dev/null 2>&1 && return 0
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing openmpi-bin"
        apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
            openmpi-bin >&2 && return 0
    fi
    say "memguard: the tests of ranks need mpirun, which is not on the PATH"
    say "    fix: as root, on Debian: apt-get install openmpi-bin"
    return 1
}

# have_prometheus: ensure that Prometheus and promtool are on the PATH or in $VENV/prometheus, for the tests of the metrics.
# Debian's package is unpacked there: installing it would start a server.
have_prometheus() {
    local folder code=0
    if command -v prometheus >/dev/null 2>&1 && command -v promtool >/dev/null 2>&1; then
        return 0
    fi
    [ ! -x "$VENV/prometheus/usr/bin/promtool" ] || return 0
    folder=$(mktemp -d) || return
    fetch_prometheus "$folder" || code=$?
    rm -rf "$folder"
    if [ "$code" -ne 0 ]; then
        say "memguard: the tests of the metrics need Prometheus, which is not on the PATH"
        say "    fix: as root, on Debian: apt-get install prometheus"
    fi
    return "$code"
}

fetch_prometheus() {
    command -v apt-get >/dev/null 2>&1 && command -v dpkg-deb >/dev/null 2>&1 || return
    say "fetching prometheus"
    [ "$(id -u)" -ne 0 ] || apt-get update -qq >&2 || return
    (cd "$1" && apt-get download -qq -o APT::Sandbox::User="$(id -un)" prometheus >&2) || return
    rm -rf "$VENV/prometheus" || return
    dpkg-deb -x "$1"/prometheus_*.deb "$VENV/prometheus"
}

# have_axe: ensure that axe-core, an accessibility checker (screen readers, keyboard use), is in $VENV/axe-core.
AXE=4.14.1
AXE_SHA512=1477dafa598d8d065f273d6af302aa203c02e83131707b7fa648cd41bd3d6b734f8c22a0dab86ee6a6f64b8afbe804b214d36db85a2826965edfb3a0b9d546b5
have_axe() {
    local folder code=0
    [ "$(cat "$VENV/axe-core/version" 2>/dev/null || true)" != "$AXE" ] || return 0
    folder=$(mktemp -d) || return
    fetch_axe "$folder" || code=$?
    rm -rf "$folder"
    if [ "$code" -ne 0 ]; then
        say "memguard: npm could not download axe-core $AXE, which the tests of the report need"
        say "    fix: install npm, on Debian and Ubuntu: apt-get install npm; and check that it reaches its registry"
    fi
    return "$code"
}

fetch_axe() {
    (cd "$1" && npm pack --silent "axe-core@$AXE" >/dev/null) || return
    printf '%s  %s\n' "$AXE_SHA512" "$1/axe-core-$AXE.tgz" | sha512sum --check --status || return
    tar xzf "$1/axe-core-$AXE.tgz" -C "$1" package/axe.min.js || return
    mkdir -p "$VENV/axe-core" || return
    cp "$1/package/axe.min.js" "$VENV/axe-core/axe.min.js" || return
    printf '%s\n' "$AXE" >"$VENV/axe-core/version"
}
