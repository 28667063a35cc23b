"""Finding a Python, making .venv, and the wheel: with pretended Pythons, and without the network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import caffe2_recurrent

REPOSITORY = Path(caffe2_recurrent.__file__).parent.parent
NEEDED = "sh sed sort cat cksum dirname rm mv mkdir chmod cp tail make".split()

# A Python that says it is another one. It probes truly, makes an environment of itself, and only notes what
# pip is asked to do, and that it is to compile what it can: all it cannot.
PRETENDED = """#!/bin/sh
case $1 in
    *probe.py)
        exec "{real}" -c '
import sys
sys.version_info, sys.executable, sys.prefix = ({version}, 1, "final", 0), "{path}", sys.base_prefix
{also}
exec(open(sys.argv[1]).read())' "$1" ;;
    -c) exit 0 ;;
esac
echo "$*" >>"{log}"
case $* in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip install --quiet"*) exit {upgrade} ;;
    "-m pip install --no-compile --editable"*) exit $(tail -n 1 "{status}") ;;
    "-m compileall"*) exit 1 ;;
esac
"""


class Machine:
    """A home, a PATH and a checkout in which set-up runs."""

    def __init__(self, root: Path) -> None:
        self.home = root / "home"
        self.bin = root / "bin"
        self.checkout = root / "check out"
        self.log = root / "log"
        self.status = root / "status"
        self.variables: dict[str, str] = {}
        for folder in (self.home, self.bin, self.checkout):
            folder.mkdir()
        for name in NEEDED:
            program = shutil.which(name)
            if program:
                (self.bin / name).symlink_to(program)
        shutil.copytree(str(REPOSITORY / "scripts"), str(self.checkout / "scripts"))
        shutil.copy(str(REPOSITORY / "Makefile"), str(self.checkout))
        for name in ("setup.py", "setup.cfg", "pyproject.toml"):
            (self.checkout / name).write_text("one\n")
        self.pip_fails(0)

    def pip_fails(self, status: int) -> None:
        self.status.write_text(f"{status}\n")

    def add_python(self, path: Path, version: str, also: str = "", upgrade: int = 0) -> Path:
        return self.add_program(
            path,
            PRETENDED.format(
                real=sys.executable,
                version=version.replace(".", ", "),
                path=path,
                also=also,
                log=self.log,
                status=self.status,
                upgrade=upgrade,
            ),
        )

    def add_program(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command,
            cwd=str(self.checkout),
            env={"PATH": str(self.bin), "HOME": str(self.home), **self.variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def found(self) -> str:
        done = self.run("sh", "scripts/find-python")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def refusal(self) -> str:
        done = self.run("sh", "scripts/find-python")
        assert done.returncode == 1
        assert done.stdout == ""
        return done.stderr

    def set_up(self) -> subprocess.CompletedProcess:
        self.log.write_text("")
        return self.run("sh", "scripts/setup")

    def asked(self) -> list[str]:
        """What Pythons were asked to do in the last set-up: 'venv', 'upgrade', 'install', 'compile'."""
        names = {
            "-m venv": "venv",
            "-m pip install --quiet": "upgrade",
            "-m pip": "install",
            "-m compileall": "compile",
        }
        asked = self.log.read_text().splitlines()
        return [next(name for start, name in names.items() if line.startswith(start)) for line in asked]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


SHIM = "#!/bin/sh\necho 'pyenv: python3.9: command not found' >&2\nexit 127\n"


def test_nothing_found_says_once_what_was_tried_and_how_to_get_one(machine):
    machine.add_program(machine.bin / "python3.9", SHIM)
    machine.add_python(machine.bin / "python3.8", "3.12")
    machine.add_python(machine.bin / "python3.7", "3.7", also='sys.modules["ensurepip"] = None')
    message = machine.refusal()
    assert message.startswith("No usable Python found. Caffe2 exists for Python 3.7, 3.8 and 3.9 only. Tried:")
    assert f"  {machine.bin}/python3.9: does not start\n" in message
    assert f"  {machine.bin}/python3.8: it is Python 3.12, and Caffe2 needs 3.7 to 3.9\n" in message
    assert f"  {machine.bin}/python3.7: it cannot make virtual environments: " in message
    assert "apt install python3.7-venv python3.7-distutils" in message
    assert f"  pyenv's {machine.home}/.pyenv/versions: no 3.9, 3.8 or 3.7\n" in message
    assert "  uv on PATH: not there\n" in message
    for way in ("pyenv install 3.9", "uv python install 3.9", "apt install", "conda create"):
        assert message.count(way) >= 1
    assert "make PYTHON=/path/to/python3.9" in message


def test_names_on_path_in_order(machine):
    machine.add_python(machine.bin / "python3.7", "3.7")
    assert machine.found() == f"{machine.bin}/python3.7"
    machine.add_python(machine.bin / "python3.8", "3.8")
    assert machine.found() == f"{machine.bin}/python3.8"
    machine.add_program(machine.bin / "python3.9", SHIM)
    assert machine.found() == f"{machine.bin}/python3.8"


@pytest.mark.parametrize("told_by", ["home", "variable", "pyenv"])
def test_pyenv_newest_patch_of_the_newest_series(told_by, machine):
    root = machine.home / (".pyenv" if told_by == "home" else "else where")
    if told_by == "variable":
        machine.variables["PYENV_ROOT"] = str(root)
    elif told_by == "pyenv":
        machine.add_program(machine.bin / "pyenv", f"#!/bin/sh\necho '{root}'\n")
    for name in ("3.7.16", "3.8.18", "3.9.2", "3.9.18", "3.10.13"):
        machine.add_python(root / "versions" / name / "bin" / "python", name.rpartition(".")[0])
    assert machine.found() == f"{root}/versions/3.9.18/bin/python"
    machine.add_program(root / "versions" / "3.9.18" / "bin" / "python", SHIM)
    assert machine.found() == f"{root}/versions/3.9.2/bin/python"


def test_path_comes_before_pyenv_and_pyenv_before_uv(machine):
    machine.add_program(machine.bin / "uv", "#!/bin/sh\nexit 1\n")
    below_pyenv = machine.add_python(machine.home / ".pyenv/versions/3.9.18/bin/python", "3.9")
    assert machine.found() == str(below_pyenv)
    on_path = machine.add_python(machine.bin / "python3.7", "3.7")
    assert machine.found() == str(on_path)


def test_uv_finds_one(machine):
    python = machine.add_python(machine.home / "uv python", "3.8")
    machine.add_program(machine.bin / "uv", f"#!/bin/sh\n[ \"$*\" = 'python find 3.8' ] && echo '{python}'\n")
    assert machine.found() == str(python)


def test_uv_installs_one(machine):
    python = machine.add_python(machine.home / "cpython", "3.9")
    installed = machine.home / "installed"
    machine.add_program(
        machine.bin / "uv",
        f"""#!/bin/sh
case $* in
    "python install 3.9") echo installing; : >"{installed}" ;;
    "python find 3.9") [ -f "{installed}" ] && echo "{python}" ;;
    *) exit 2 ;;
esac
""",
    )
    assert machine.found() == str(python)


def test_uv_that_can_do_neither_is_told(machine):
    machine.add_program(machine.bin / "uv", "#!/bin/sh\nexit 2\n")
    message = machine.refusal()
    assert "uv python find 3.7: nothing found\n  uv python install 3.9: failed\n" in message


def test_python_by_hand(machine):
    machine.add_python(machine.bin / "python3.9", "3.9")
    chosen = machine.add_python(machine.home / "my python", "3.8")
    machine.variables["PYTHON"] = str(chosen)
    assert machine.found() == str(chosen)
    machine.variables["PYTHON"] = "python3.9"
    assert machine.found() == f"{machine.bin}/python3.9"


@pytest.mark.parametrize(
    "version, also, told",
    [
        ("3.11", "", "it is Python 3.11, and Caffe2 needs 3.7 to 3.9"),
        ("2.7", "", "it is Python 2.7, and Caffe2 needs 3.7 to 3.9"),
        ("3.9", 'sys.modules["venv"] = None', "it cannot make virtual environments: "),
        ("3.9", "sys.exit(3)", "does not start"),
        (None, "", "there is no such program"),
    ],
)
def test_python_by_hand_that_cannot_be_used_ends_the_search(version, also, told, machine):
    machine.add_python(machine.bin / "python3.9", "3.9")
    path = machine.home / "chosen"
    if version:
        machine.add_python(path, version, also=also)
    machine.variables["PYTHON"] = str(path)
    message = machine.refusal()
    assert message.startswith(f"PYTHON is set to {path}, which cannot be used: {told}")
    assert "Set it to a Python 3.7, 3.8 or 3.9" in message
    assert not (machine.checkout / ".venv").exists()


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="only for tests that run in a virtual environment")
def test_of_an_environment_its_original_is_taken(machine):
    machine.variables["PYTHON"] = sys.executable
    found = Path(machine.found())
    assert Path(sys.prefix) not in found.parents
    assert Path(sys.base_prefix).resolve() in found.parents


def test_set_up_from_scratch_and_nothing_the_second_time(machine):
    machine.add_python(machine.bin / "python3.9", "3.9")
    first = machine.set_up()
    assert first.returncode == 0, first.stderr
    assert f"Making .venv with {machine.bin}/python3.9 (there is none yet)." in first.stdout
    assert machine.asked() == ["venv", "upgrade", "install", "compile"]
    assert "-m pip install --no-compile --editable .[caffe2,test,demo,draw,onnx]" in machine.log.read_text()
    second = machine.set_up()
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert machine.asked() == []


def test_set_up_without_a_python(machine):
    done = machine.set_up()
    assert done.returncode == 1
    assert "No usable Python found." in done.stderr
    assert done.stderr.count("No usable Python found.") == 1


def test_set_up_that_was_interrupted_starts_over(machine):
    machine.add_python(machine.bin / "python3.9", "3.9")
    machine.pip_fails(1)
    assert machine.set_up().returncode == 1
    machine.pip_fails(0)
    again = machine.set_up()
    assert again.returncode == 0
    assert "(its set-up was not finished)" in again.stdout
    assert machine.asked() == ["venv", "upgrade", "install", "compile"]
    assert machine.set_up().stdout == ""


def test_set_up_installs_again_when_the_dependencies_change(machine):
    machine.add_python(machine.bin / "python3.9", "3.9")
    machine.set_up()
    (machine.checkout / "setup.cfg").write_text("two\n")
    machine.pip_fails(1)
    assert machine.set_up().returncode == 1
    assert machine.asked() == ["install"]
    machine.pip_fails(0)
    assert machine.set_up().returncode == 0
    # The failed one may have left anything behind.
    assert machine.asked() == ["venv", "upgrade", "install", "compile"]
    (machine.checkout / "setup.cfg").write_text("three\n")
    assert machine.set_up().returncode == 0
    assert machine.asked() == ["install", "compile"]
    assert machine.set_up().stdout == ""


def test_set_up_replaces_an_environment_whose_python_does_not_start(machine):
    machine.add_python(machine.bin / "python3.9", "3.9")
    machine.set_up()
    inside = machine.checkout / ".venv" / "bin" / "python"
    inside.unlink()
    inside.symlink_to("/no/such/python3.9")
    done = machine.set_up()
    assert done.returncode == 0
    assert "(its Python does not start)" in done.stdout


def test_set_up_replaces_an_environment_that_moved(machine):
    machine.add_python(machine.bin / "python3.9", "3.9")
    machine.set_up()
    moved = machine.home / "moved"
    machine.checkout.rename(moved)
    machine.checkout = moved
    assert "(it was made for another folder)" in machine.set_up().stdout


def test_set_up_replaces_an_environment_when_another_python_is_named(machine):
    machine.add_python(machine.bin / "python3.9", "3.9")
    machine.add_python(machine.bin / "python3.8", "3.8")
    machine.set_up()
    machine.variables["PYTHON"] = "python3.8"
    assert "(it was made with another Python)" in machine.set_up().stdout
    assert machine.set_up().stdout == ""
    # Without a name, what is there is kept.
    del machine.variables["PYTHON"]
    assert machine.set_up().stdout == ""


def test_set_up_goes_on_with_an_old_pip(machine):
    machine.add_python(machine.bin / "python3.9", "3.9", upgrade=1)
    done = machine.set_up()
    assert done.returncode == 0
    assert "pip could not be brought up to date" in done.stderr
    assert machine.asked() == ["venv", "upgrade", "install", "compile"]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_hands_python_on(machine):
    machine.add_python(machine.bin / "python3.9", "3.9")
    chosen = machine.add_python(machine.home / "chosen", "3.8")
    assert machine.run("make", "setup", f"PYTHON={chosen}").returncode == 0
    assert f"python {chosen}\n" in (machine.checkout / ".venv" / "ready").read_text()
    done = machine.run("make", "setup", "PYTHON=nothing-of-this-name")
    assert done.returncode != 0
    assert "there is no such program" in done.stderr


def run_python(*arguments: str, **options) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_wheel_is_whole_and_works_by_itself(tmp_path):
    # From a copy: setuptools would take up what an earlier build left in the checkout.
    source = tmp_path / "source"
    litter = shutil.ignore_patterns("__pycache__")
    shutil.copytree(str(REPOSITORY / "caffe2_recurrent"), str(source / "caffe2_recurrent"), ignore=litter)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (REPOSITORY / name).exists():
            shutil.copy(str(REPOSITORY / name), str(source))
    pip = ["-m", "pip", "--disable-pip-version-check"]
    run_python(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"caffe2_recurrent-{caffe2_recurrent.__version__}-py3-none-any.whl"

    with zipfile.ZipFile(str(wheel)) as archive:
        names = archive.namelist()
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
    packaged = {name for name in names if ".dist-info/" not in name}
    files = [path for path in (source / "caffe2_recurrent").rglob("*") if path.is_file()]
    assert packaged == {path.relative_to(source).as_posix() for path in files}
    assert "caffe2_recurrent/py.typed" in packaged
    # Whoever brings their own Caffe2 must not be given torch.
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert [line for line in required if "extra ==" not in line] == ["Requires-Dist: numpy"]
    pin = re.compile(r"Requires-Dist: torch *\(?==1\.10\.2\)? *; *extra == .caffe2.")
    assert any(map(pin.match, required))

    target = tmp_path / "target"
    run_python(*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    told = run_python(
        "-c",
        "import caffe2_recurrent; print(caffe2_recurrent.__file__)",
        cwd=str(tmp_path),
        env={**os.environ, "PYTHONPATH": str(target)},
    )
    assert str(target) in told.splitlines()[-1]
