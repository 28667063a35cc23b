"""`python -m caffe2_recurrent SCRIPT`: the script runs as Python would run it, on our builder."""

import importlib
import os
import py_compile
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import caffe2_recurrent
from caffe2_recurrent import __main__ as command

REPOSITORY = Path(caffe2_recurrent.__file__).parent.parent


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def python(*arguments, cwd, **environment):
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)), **environment)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=str(cwd),
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    # What torch 1.7 says when it is imported on a machine without a GPU.
    done.stderr = re.sub(r"^\[W CUDAFunctions.*\n", "", done.stderr)
    return done


def both(path, *arguments, cwd):
    """What Python makes of a script, and what we make of it."""
    return python(path, *arguments, cwd=cwd), python("-m", "caffe2_recurrent", path, *arguments, cwd=cwd)


@pytest.fixture
def here(monkeypatch):
    """Take back what `main` changes in this process."""
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    yield
    caffe2_recurrent.uninstall()


def test_a_script_sees_what_it_would_see(tmp_path):
    write(tmp_path / "folder" / "beside.py", "value = 3")
    path = write(
        tmp_path / "folder" / "script.py",
        """\
        import sys
        import beside
        print(__name__, __file__, sys.argv, sys.path[0], __spec__, beside.value, __doc__)
        print(sys.modules["__main__"].beside is beside, vars(sys.modules["__main__"]) is globals())
        """,
    )
    for given, cwd in ((path, tmp_path), ("script.py", tmp_path / "folder"), ("folder/script.py", tmp_path)):
        theirs, ours = both(given, "-x", "--help", "a b", cwd=cwd)
        assert (ours.stdout, ours.returncode) == (theirs.stdout, 0)
        assert "True True" in ours.stdout


def test_a_link_to_a_script_finds_what_is_beside_the_script(tmp_path):
    write(tmp_path / "folder" / "beside.py", "value = 3")
    path = write(tmp_path / "folder" / "script.py", "import beside; print(beside.value)")
    (tmp_path / "link.py").symlink_to(path)
    theirs, ours = both("link.py", cwd=tmp_path)
    assert ours.stdout == theirs.stdout == "3\n"


@pytest.mark.parametrize("archive", [False, True], ids=["folder", "zip"])
@pytest.mark.parametrize("relative", [False, True], ids=["full path", "relative path"])
def test_folders_and_zip_files_run_too(tmp_path, archive, relative):
    """Also when they go elsewhere before they import more of themselves."""
    text = "import os, sys; os.chdir('/'); import beside; "
    text += "print(__name__, __file__, __package__, __spec__.name, sys.argv, sys.path[0], beside.value)"
    path = str(tmp_path / "application")
    if archive:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("__main__.py", text)
            file.writestr("beside.py", "value = 3")
    else:
        write(tmp_path / "application" / "__main__.py", text)
        write(tmp_path / "application" / "beside.py", "value = 3")
    theirs, ours = both("application" if relative else path, "x", cwd=tmp_path)
    assert (ours.stdout, ours.returncode) == (theirs.stdout, theirs.returncode)
    assert sys.version_info < (3, 9) or ours.returncode == 0, ours.stderr


def test_a_compiled_script(tmp_path):
    path = write(tmp_path / "script.py", "import sys; print(__name__, __file__, sys.argv, sys.path[0])")
    py_compile.compile(path, str(tmp_path / "script.pyc"))
    theirs, ours = both(str(tmp_path / "script.pyc"), "x", cwd=tmp_path)
    assert (ours.stdout, ours.returncode) == (theirs.stdout, 0), ours.stderr


def test_the_script_uses_ours(tmp_path):
    path = write(
        tmp_path / "script.py",
        """\
        from caffe2.python import recurrent
        from caffe2.python.recurrent import LSTM, recurrent_net
        print(LSTM.__module__, recurrent_net.__module__, recurrent.LSTM is LSTM)
        """,
    )
    done = python("-m", "caffe2_recurrent", path, cwd=tmp_path)
    assert done.stdout == "caffe2_recurrent.lstm caffe2_recurrent.recurrent True\n", done.stderr


def test_exit_handlers_and_threads_of_the_script_use_ours(tmp_path):
    path = write(
        tmp_path / "script.py",
        """\
        import atexit, threading, time
        from caffe2.python import recurrent
        value = 3
        def late(who):
            print(who, value, recurrent.LSTM.__module__, flush=True)
        atexit.register(late, "handler")
        threading.Timer(0.2, late, ["thread"]).start()
        """,
    )
    done = python("-m", "caffe2_recurrent", path, cwd=tmp_path)
    assert done.stdout == "thread 3 caffe2_recurrent.lstm\nhandler 3 caffe2_recurrent.lstm\n", done.stderr


@pytest.mark.parametrize(
    "ending, status",
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit(5)", 5),
        ("sys.exit('a reason')", 1),
        ("1 / 0", 1),
        ("raise SystemExit(7)", 7),
        ("os._exit(9)", 9),
    ],
)
def test_exit_status(tmp_path, ending, status):
    theirs, ours = both(write(tmp_path / "script.py", "import os, sys\n" + ending), cwd=tmp_path)
    assert (ours.returncode, ours.stderr) == (theirs.returncode, theirs.stderr)
    assert ours.returncode == status


def test_an_interrupted_script_ends_as_python_ends_it(tmp_path):
    path = write(tmp_path / "script.py", "import os, signal\nos.kill(os.getpid(), {:d})\n".format(signal.SIGINT))
    theirs, ours = both(path, cwd=tmp_path)
    assert ours.returncode == theirs.returncode
    assert ours.stderr == theirs.stderr
    assert "KeyboardInterrupt" in ours.stderr


@pytest.mark.parametrize(
    "text",
    [
        "def inner():\n    raise ValueError('wrong')\n\ninner()\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['absent']\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise RuntimeError('why') from error\n",
        "import no_such_module_at_all\n",
        "def broken(:\n",
        "x = '\u00e9'\nraise ValueError(x)\n",
        "import sys\nsys.excepthook = lambda kind, error, trace: sys.stderr.write(str(trace.tb_lineno))\n1 / 0\n",
        "import runpy\nrunpy.run_path('absent.py')\n",
    ],
    ids=["raise", "context", "cause", "import", "syntax", "not ASCII", "hook of its own", "through runpy"],
)
def test_tracebacks_begin_at_the_script(tmp_path, text):
    theirs, ours = both(write(tmp_path / "script.py", text), cwd=tmp_path)
    assert ours.stderr == theirs.stderr
    assert ours.returncode == theirs.returncode == 1


def test_a_module_runs_too(tmp_path):
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "tool.py", "import sys; print(__name__, __package__, sys.argv, sys.path[0])")
    theirs = python("-m", "package.tool", "-a", "b", cwd=tmp_path)
    ours = python("-m", "caffe2_recurrent", "-m", "package.tool", "-a", "b", cwd=tmp_path)
    assert (ours.stdout, ours.returncode) == (theirs.stdout, 0), ours.stderr


def test_the_traceback_of_a_module_begins_at_the_module(tmp_path):
    write(tmp_path / "tool.py", "1 / 0")
    done = python("-m", "caffe2_recurrent", "-m", "tool", cwd=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(
        r'Traceback \(most recent call last\):\n  File ".*tool.py", line 1, in <module>\n    1 / 0\n'
        r"ZeroDivisionError: division by zero\n",
        done.stderr,
    )


def test_the_doctor_is_still_there(tmp_path):
    assert "LSTM" in python("-m", "caffe2_recurrent.doctor", cwd=tmp_path).stdout


@pytest.mark.parametrize("arguments", [[], ["-m"], ["-x"], ["--verbose", "script.py"], ["-m", "-x"]])
def test_usage(capsys, arguments):
    assert command.main(arguments) == 2
    assert capsys.readouterr() == ("", command.USAGE + "\n")


@pytest.mark.parametrize("argument", ["-h", "--help"])
def test_help(capsys, argument):
    assert command.main([argument, "x"]) == 0
    assert capsys.readouterr() == (command.USAGE + "\n", "")


def test_usage_from_the_command_line(tmp_path):
    done = python("-m", "caffe2_recurrent", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m caffe2_recurrent SCRIPT [ARGS]\n")


def test_a_missing_script(tmp_path, capsys, here):
    path = str(tmp_path / "absent.py")
    assert command.main([path]) == 2
    assert capsys.readouterr().err == "caffe2_recurrent cannot run '{}': No such file or directory\n".format(path)


MISSING = ("absent", "absent.tool", "package.absent", "package.absent.tool", ".package", "alone.tool")


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_module(tmp_path, capsys, here, name):
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "alone.py", "")
    sys.path.insert(0, str(tmp_path))
    assert command.main(["-m", name]) == 2
    assert capsys.readouterr().err == "caffe2_recurrent cannot run '{}': there is no module of that name\n".format(name)
    for module in ("package", "alone"):
        sys.modules.pop(module, None)


def test_a_file_in_the_place_of_a_module(tmp_path, capsys, here, monkeypatch):
    write(tmp_path / "script.py", "print('run')")
    monkeypatch.chdir(tmp_path)
    sys.path.insert(0, "")
    assert command.main(["-m", "script.py"]) == 2
    assert capsys.readouterr() == ("", "caffe2_recurrent cannot run 'script.py': it is a file; leave out the -m\n")


def test_a_package_without_a_main(tmp_path, capsys, here):
    write(tmp_path / "package" / "__init__.py", "")
    sys.path.insert(0, str(tmp_path))
    assert command.main(["-m", "package"]) == 2
    assert capsys.readouterr().err == "caffe2_recurrent cannot run 'package': it is a package without a __main__\n"
    write(tmp_path / "package" / "__main__.py", "print(__name__)")
    importlib.invalidate_caches()
    assert command.main(["-m", "package"]) == 0
    assert capsys.readouterr().out == "__main__\n"
    sys.modules.pop("package", None)


def test_a_package_that_misses_a_module_says_which(tmp_path, here):
    write(tmp_path / "package" / "__init__.py", "import missed_by_package")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="No module named 'missed_by_package'"):
        command.main(["-m", "package.tool"])


@pytest.mark.parametrize("archive", [False, True], ids=["folder", "zip"])
def test_a_folder_without_a_main(tmp_path, capsys, here, archive):
    path = str(tmp_path)
    if archive:
        path = str(tmp_path / "x.zip")
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("beside.py", "value = 3")
    assert command.main([path]) == 2
    assert capsys.readouterr().err == "caffe2_recurrent cannot run '{}': it holds no __main__.py\n".format(path)


def test_run_in_this_process(tmp_path, capsys, here):
    path = write(tmp_path / "script.py", "import sys; print(__name__, sys.argv[1:], sys.path[0])")
    assert command.main([path, "a"]) == 0
    assert capsys.readouterr().out == "__main__ ['a'] {}\n".format(os.path.realpath(str(tmp_path)))
    assert sys.modules["__main__"].__file__ == path


def test_module_run_in_this_process(tmp_path, capsys, here):
    write(tmp_path / "a_tool.py", "import sys; print(__name__, sys.argv[1:])")
    sys.path.insert(0, str(tmp_path))
    assert command.main(["-m", "a_tool", "a"]) == 0
    assert capsys.readouterr().out == "__main__ ['a']\n"


def test_folder_run_in_this_process(tmp_path, capsys, here):
    write(tmp_path / "folder" / "__main__.py", "import sys; print(sys.path[0])")
    assert command.main([str(tmp_path / "folder")]) == 0
    assert capsys.readouterr().out == "{}\n".format(tmp_path / "folder")


@pytest.mark.parametrize("isolated", [False, True])
def test_an_isolated_python_keeps_its_path(tmp_path, capsys, here, monkeypatch, isolated):
    class Flags:
        pass

    Flags.isolated = isolated
    monkeypatch.setattr(sys, "flags", Flags)
    before = list(sys.path)
    command.main([write(tmp_path / "script.py", "")])
    assert (sys.path == before) is isolated


def test_the_hook_shows_the_frames_of_the_script_only(tmp_path, here):
    shown = []
    sys.excepthook = lambda *what: shown.append(what)
    path = write(tmp_path / "script.py", "def fail():\n    raise KeyError('k')\n\nfail()\n")
    with pytest.raises(KeyError) as caught:
        command.main([path])
    error, trace = caught.value, caught.tb.tb_next  # without the frame of this test
    sys.excepthook(type(error), error, trace)
    ((kind, same, shortened),) = shown
    assert (kind, same) == (KeyError, error)
    assert error.__traceback__ is shortened
    assert (shortened.tb_frame.f_code.co_filename, shortened.tb_lineno) == (path, 4)


def test_the_hook_shows_no_frame_where_the_script_did_not_begin(tmp_path, here):
    shown = []
    sys.excepthook = lambda *what: shown.append(what)
    with pytest.raises(SyntaxError) as caught:
        command.main([write(tmp_path / "script.py", "def broken(:\n")])
    sys.excepthook(SyntaxError, caught.value, caught.tb.tb_next)
    assert [trace for _, _, trace in shown] == [None]
