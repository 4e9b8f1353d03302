"""Builds Horovod: cache, lock, source, edits, compiler, probe; a wheel counts only after all."""

from __future__ import annotations

import contextlib
import datetime
import os
import pprint
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.horovod_build import in_wheel
from hvdkit.horovod_build.cache import WheelCache, cache_root
from hvdkit.horovod_build.cuda import find_cuda, shadow_wheels
from hvdkit.horovod_build.edits import apply_edits
from hvdkit.horovod_build.machine import Machine, inspect_machine
from hvdkit.horovod_build.plan import WHEEL_VERSION, BuildOptions, BuildPlan, check_gpu, make_plan
from hvdkit.horovod_build.probe import probe_wheel
from hvdkit.horovod_build.processes import first_errors, run_logged
from hvdkit.horovod_build.sdist import check_sdist, fetch_sdist, unpack
from hvdkit.horovod_build.short_paths import short_paths

Report = Callable[[str], None]


@dataclass(frozen=True)
class BuildResult:
    """A wheel that passed its probe."""

    wheel: Path
    plan: BuildPlan
    from_cache: bool


def default_jobs() -> int:
    """Compilers at a time: one a core, but no more than memory holds at 2 GB each.

    Example:
        >>> default_jobs() >= 1
        True
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // (2 << 30)))


def plan_build(options: BuildOptions, base: Mapping[str, str]) -> tuple[Machine, BuildPlan]:
    """Looks at this machine and works out the build, without doing any of it.

    Raises:
        BuildError: Something that the build needs is missing.
    """
    machine = inspect_machine(base)
    check_gpu(options, machine)
    cuda = None
    if options.gpu is not None:
        cuda = find_cuda(machine.site_packages, machine.torch_cuda, base)
    return machine, make_plan(options, machine, cuda=cuda, base=base)


def build(
    options: BuildOptions,
    *,
    sdist: Path | None = None,
    wheel_dir: Path | None = None,
    base: Mapping[str, str] | None = None,
    report: Report = lambda line: None,
) -> BuildResult:
    """Returns a wheel of Horovod for this environment, from the cache or newly built.

    Args:
        options: What to build.
        sdist: The source release where it is not to be fetched.
        wheel_dir: Folder that gets a copy of the wheel.
        base: Environment variables to work with; this process's own by default.
        report: Called with a line for the user at each step.

    Raises:
        BuildError: The one reason why there is no wheel. The cache is as it was before.

    Example:
        >>> build(BuildOptions(frameworks=("torch",)), report=print).wheel  # doctest: +SKIP
        PosixPath('.../horovod-0.28.1+hvdkit.1-cp312-cp312-linux_x86_64.whl')
    """
    base = dict(os.environ if base is None else base)
    if sdist is not None:
        check_sdist(sdist)
    machine, plan = plan_build(options, base)
    cache = WheelCache(cache_root(base))
    with _disk_errors(cache.root):
        wheel = cache.find(plan.key)
        from_cache = wheel is not None
        if wheel is None:
            cache.prepare()
            waiting = f"another process builds the same Horovod; waiting for it ({cache.root})"
            with cache.lock(plan.key, lambda: report(waiting)):
                wheel = cache.find(plan.key)
                from_cache = wheel is not None
                if wheel is None:
                    wheel = _build_locked(plan, machine, cache, sdist, base, report)
    if wheel_dir is not None:
        with _disk_errors(wheel_dir):
            wheel = _copy(wheel, wheel_dir)
    return BuildResult(wheel, plan, from_cache)


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = error.filename or folder
        raise BuildError(
            f"Expected to write below {folder}. Received: {error.strerror} ({place}). Free some "
            "space there (a build takes about 1 GB), or set XDG_CACHE_HOME to another disk."
        ) from error


def _build_locked(
    plan: BuildPlan,
    machine: Machine,
    cache: WheelCache,
    sdist: Path | None,
    base: Mapping[str, str],
    report: Report,
) -> Path:
    log = cache.log_path(plan.key)
    log.unlink(missing_ok=True)
    started = time.monotonic()
    with cache.workspace(plan.key) as workspace:
        if sdist is None:
            report("fetching Horovod's source release")
            sdist = fetch_sdist(cache.root / "sdist", dict(base))
        report(f"building Horovod {WHEEL_VERSION} for {', '.join(plan.frameworks)}; log: {log}")
        out = workspace / "out"
        wheel = _compile(plan, machine, sdist, workspace, log, base, report)
        probe_wheel(
            wheel,
            plan,
            machine,
            workspace=workspace,
            log=log,
            environment=plan.full_environment(base),
            report=report,
        )
        final = cache.publish(plan.key, out)
    minutes = (time.monotonic() - started) / 60
    report(f"built and probed in {minutes:.1f} min: {final}")
    return final


def write_record(source: Path, plan: BuildPlan) -> None:
    """Puts into the source what the wheel is made from, and the check that reads it."""
    record = {
        **plan.facts,
        "key": plan.key,
        "edit_list": [edit.describe() for edit in plan.edits],
        "built": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    common = source / "horovod" / "common"
    common.joinpath("hvdkit_record.py").write_text(
        f'"""What this Horovod was built from."""\n\nRECORD = {pprint.pformat(record, width=96)}\n'
    )
    shutil.copyfile(in_wheel.__file__, common / "hvdkit_check.py")


def _compile(
    plan: BuildPlan,
    machine: Machine,
    sdist: Path,
    workspace: Path,
    log: Path,
    base: Mapping[str, str],
    report: Report,
) -> Path:
    last = -10

    def on_percent(percent: int) -> None:
        nonlocal last
        if percent >= last + 10:
            last = percent
            report(f"compiling: {percent} %")

    out = workspace / "out"
    with short_paths(machine.prefix, workspace, plan.mpi_bin) as short:
        environment = plan.full_environment(base, short.mpi_bin)
        # Compilers and pip leave their own temporary files where ours are removed.
        environment["TMPDIR"] = str(short.work)
        if plan.cuda is not None:
            cuda = shadow_wheels(plan.cuda, short.work / "toolkit")
            environment |= cuda.environment()
            # Horovod looks for nvcc on PATH before it looks where it was told to.
            environment["PATH"] = f"{cuda.home / 'bin'}{os.pathsep}{environment['PATH']}"
        source = unpack(sdist, short.work)
        apply_edits(source, plan.edits, plan.edit_values)
        write_record(source, plan)
        code = run_logged(
            plan.command(str(out), str(short.python)),
            environment=environment,
            cwd=source,
            log=log,
            on_percent=on_percent,
        )
    wheels = list(out.glob("*.whl"))
    if code == 0 and len(wheels) == 1:
        return wheels[0]
    text = log.read_text(errors="replace")
    if "No space left on device" in text:
        raise BuildError(
            f"Expected room for a build (about 1 GB) below {workspace}. Received: no space left "
            f"on the device. Free some, or set XDG_CACHE_HOME to another disk. The log: {log}"
        )
    lines = first_errors(text) or text.strip().splitlines()[-5:]
    shown = "\n".join(f"  {line}" for line in lines)
    raise BuildError(f"Horovod did not compile (exit code {code}):\n{shown}\nThe log: {log}")


def _copy(wheel: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / wheel.name
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        copied = shutil.copyfile(wheel, Path(temporary, wheel.name))
        os.replace(copied, target)
    return target


def installed_key(site_packages: Path) -> str | None:
    """Key of the Horovod in this environment; None where there is none of ours.

    Example:
        >>> installed_key(Path("/nowhere")) is None
        True
    """
    try:
        text = site_packages.joinpath("horovod", "common", "hvdkit_record.py").read_text()
    except OSError:
        return None
    # Only our own quoting is looked for: the file is data of another package, not to be run.
    start = text.partition("'key': '")[2]
    return start.partition("'")[0] or None


def install(result: BuildResult, site_packages: Path, report: Report) -> None:
    """Installs the wheel into this environment, unless just that one is there.

    Raises:
        BuildError: pip refused.
    """
    if installed_key(site_packages) == result.plan.key:
        return
    report("installing Horovod")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"]
    command.append(str(result.wheel))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"pip could not install {result.wheel}:\n{done.stderr.strip()[-2000:]}")
