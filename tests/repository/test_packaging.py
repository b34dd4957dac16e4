"""`converters/` stands at the top of the repository and must be installed as
`cspd_jax.converters`."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# Neither an editable install's finder nor anything else that knows where the converters
# are.
NOT_INSTALLED = (
    "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in"
    " repr(f)];import cspd_jax, cspd_jax.converters.source as s;"
    " cspd_jax.load('default'); print(s.__file__)"
)


@pytest.mark.slow
def test_a_checkout_needs_no_install():
    """Python that is started at the top of the repository finds the folder `cspd_jax`
    there, whatever is installed."""
    command = [sys.executable, "-c", NOT_INSTALLED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert Path(done.stdout.strip()) == ROOT / "converters" / "source.py"


@pytest.mark.slow
def test_wheel_is_complete(tmp_path):
    """Builds a wheel (fetches setuptools) and imports everything from it, away from the
    repository."""
    wheel = f"{sys.executable} -m pip wheel -q --no-deps -w {tmp_path} {ROOT}"
    subprocess.run(wheel.split(), check=True, timeout=300)
    (built,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        archive.extractall(installed)
    assert {n.split("/")[0] for n in names} == {
        "cspd_jax",
        built.name.rsplit("-", 3)[0] + ".dist-info",
    }
    modules = {
        p.relative_to(ROOT).as_posix() for p in (ROOT / "cspd_jax").rglob("*.py")
    }
    modules |= {
        f"cspd_jax/{p.relative_to(ROOT).as_posix()}"
        for p in (ROOT / "converters").rglob("*.py")
    }
    assert {n for n in names if n.endswith(".py")} == modules
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); import"
        " cspd_jax.converters.source as s;"
        "assert 'installed' in s.__file__; import cspd_jax; cspd_jax.load('default')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)
