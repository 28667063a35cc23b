"""Run by find-python in each candidate: prints 'yes <interpreter>' or 'no <reason>'."""

import os
import sys

version = "%d.%d" % sys.version_info[:2]
if not (3, 7) <= sys.version_info[:2] <= (3, 9):
    print("no it is Python " + version + ", and Caffe2 needs 3.7 to 3.9")
else:
    try:
        # What `-m venv` needs; Debian and its relatives put it into packages of its own.
        import distutils.cmd  # noqa: F401
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        print(
            "no it cannot make virtual environments: {} (Debian, Ubuntu: apt install python{}-venv "
            "python{}-distutils)".format(error, version, version)
        )
    else:
        interpreter = sys.executable
        # Of a virtual environment, the Python that it came from: it may be the very one to be replaced.
        if sys.prefix != sys.base_prefix:
            original = os.path.join(sys.base_prefix, "bin", "python" + version)
            interpreter = original if os.path.exists(original) else interpreter
        # python, python3 and python3.9 of one installation are one answer.
        print("yes " + os.path.realpath(interpreter))
