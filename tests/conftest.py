import gc
import mmap
import os
import pathlib

# The commands turn on JAX's cache on disk. Those that tests start neither read what
# others left there nor write into it.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

# Threads of one test would be in the way of the others.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jaxlib
import pytest
import shapes

# Nearly all the time goes into compiling programs that run once, and the newer way of
# compiling loops for CPUs takes three times as long. `python tests/golden_cases.py
# FOLDER` checks the code that it makes.
QUICK = "--xla_cpu_use_fusion_emitters=false"


def known(flag):
    """Says whether this XLA has the flag: an unknown one ends a process."""
    for library in pathlib.Path(jaxlib.__file__).parent.rglob("*.so"):
        with library.open("rb") as file:
            code = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if code.find(flag.encode()) >= 0:
            return True
    return False


flags = os.environ.get("XLA_FLAGS", "")
if QUICK not in flags and known("xla_cpu_use_fusion_emitters"):
    os.environ["XLA_FLAGS"] = f"{flags} {QUICK}"

# Those that tests start compile as the tests do; JAX, which reads this, is imported in
# this one already.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

if not hasattr(jax, "enable_x64"):  # before 0.8 it was an experiment
    from jax.experimental import enable_x64

    jax.enable_x64 = enable_x64

# The tests themselves keep what they compile, by the program, the compiler's version
# and its settings: a second run takes two thirds of the time. CSPD_JAX_TEST_CACHE names
# another folder for it, or none if empty.
PROGRAMS = os.environ.get(
    "CSPD_JAX_TEST_CACHE",
    str(pathlib.Path(__file__).parents[1] / ".pytest_cache/programs"),
)
if PROGRAMS:
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", PROGRAMS)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)

# Parity of the default models is checked on optimised code, and so is that of MAR by
# `test_optimised_code`. Elsewhere nearly all the time would go into compiling small
# programs that run once.
OPTIMISED = {"test_same_law"}


@pytest.fixture(scope="module", autouse=True)
def _compiler(request):
    """For the tests of a module and its fixtures. On a GPU float32 products default to
    TF32; numbers are compared at full precision."""
    before = jax.config.read("jax_disable_most_optimizations")
    optimised = request.module.__name__ in OPTIMISED
    jax.config.update("jax_disable_most_optimizations", before or not optimised)
    with jax.default_matmul_precision("highest"):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Every compiled program holds memory maps, of which Linux allows a process
    65530."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 10_000:
        jax.clear_caches()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as slow what `@pytest.mark.quick(ids)` does not name, before pytest selects
    by marks."""
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick and item.callspec.id not in quick.args:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Has the package check the shapes that its docstrings promise. Programs leave many
    objects that stay; looking through them again and again takes time."""
    shapes.check_package()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def float64():
    """Greedy claims are of token equality: rounding must have no say."""
    with jax.enable_x64(True):
        yield
