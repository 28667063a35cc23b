"""What this installation can do: `python -m caffe2_recurrent.doctor`.

`examine` finds out, `render` puts it into words. Its last line counts most: whether a small LSTM
could really be built, run and differentiated here. The command exits with 1 where it could not.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import platform
import shutil
import sys
from collections.abc import Sequence

from caffe2_recurrent import __version__, installation, mkl_dispatch, openmp_settings
from caffe2_recurrent.lstm_trial import Trial, try_network

PACKAGES = ("torch", "numpy", "protobuf", "future", "six")
# Times as fast; less is within the error of the trial.
WORTH_SAYING = 1.2


@dataclasses.dataclass(frozen=True)
class Engine:
    """What a Caffe2 that loads says about itself."""

    place: str
    in_torch_wheel: bool
    built_for_gpu: bool
    gpus: int
    aten: bool
    cudnn: bool
    gloo: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """All that the doctor found out.

    `products` is what they could gain, as in `mkl_dispatch`; `withholding` the settings with which OpenMP may give
    fewer threads than it says, as in `openmp_settings`.
    """

    versions: dict[str, str | None]
    caffe2_trouble: str | None
    engine: Engine | None
    trial: Trial
    graphviz: bool
    dot: str | None
    products: mkl_dispatch.Gain | None
    withholding: str | None

    @property
    def healthy(self) -> bool:
        """Whether recurrent networks can be built and run."""
        return self.trial.trouble is None


def examine() -> Report:
    """Find out what this installation can do; works without Caffe2."""
    trouble = installation.find_trouble()
    return Report(
        versions={name: installation.distribution_version(name) for name in PACKAGES},
        caffe2_trouble=trouble,
        engine=_examine_engine() if trouble is None else None,
        trial=try_network() if trouble is None else Trial("there is no working Caffe2 to build them with"),
        graphviz=importlib.util.find_spec("graphviz") is not None,
        dot=shutil.which("dot"),
        products=mkl_dispatch.gain() if trouble is None else None,
        withholding=openmp_settings.that_withhold_threads(),
    )


def _examine_engine() -> Engine:
    from caffe2.python import core, workspace

    place = installation.caffe2_place() or "an unknown place"
    return Engine(
        place=place,
        in_torch_wheel=installation.in_torch_wheel(place),
        # `has_gpu_support` alone is False where the GPU extension loads but finds no device.
        built_for_gpu=workspace.has_gpu_support or "caffe2.python.caffe2_pybind11_state_gpu" in sys.modules,
        gpus=workspace.NumCudaDevices(),
        aten=core.IsOperator("ATen"),
        cudnn=core.IsOperatorWithEngine("Recurrent", "CUDNN"),
        gloo=core.IsOperatorWithEngine("Allreduce", "GLOO"),
    )


def render(report: Report) -> str:
    """Put a report into aligned lines."""
    rows = [("Python", f"{platform.python_version():10} {_verdict_on_python()}")]
    rows += _rows_on_caffe2(report)
    rows += [(name, _version_and_verdict(name, version)) for name, version in report.versions.items()]
    if report.engine is not None:
        rows += _rows_on_engine(report.engine)
    if report.products is not None and report.products.times > WORTH_SAYING:
        rows.append(("products", _products(report.products)))
    if report.withholding is not None:
        rows.append(("OpenMP", _openmp(report.withholding)))
    rows.append(("graphviz", _graphviz(report)))
    rows.append(("networks", _networks(report.trial)))
    width = max(len(name) for name, _ in rows)
    lines = [f"caffe2_recurrent {__version__}", *(f"  {name:{width}}  {text}" for name, text in rows)]
    return "\n".join(line.rstrip() for line in lines)


def _verdict_on_python() -> str:
    verdict = "in bounds" if installation.python_in_bounds() else "not in bounds"
    return f"{verdict} ({installation.python_bound()})"


def _rows_on_caffe2(report: Report) -> list[tuple[str, str]]:
    if report.engine is None:
        return [("Caffe2", (report.caffe2_trouble or "").replace("Caffe2 is ", "", 1))]
    origin = "torch's wheel" if report.engine.in_torch_wheel else "own build"
    return [("Caffe2", f"{origin}, in {report.engine.place}")]


def _version_and_verdict(name: str, version: str | None) -> str:
    if name not in installation.FIRST_TOO_NEW:
        return version or "not there"
    verdict = "in bounds" if installation.in_bounds(name, version) else "not in bounds"
    bound = installation.bound(name)
    return f"{version:10} {verdict} ({bound})" if version else f"{'not there':10} ({bound})"


def _rows_on_engine(engine: Engine) -> list[tuple[str, str]]:
    if engine.gpus:
        device = f"CPU and GPU ({engine.gpus} found)"
    elif engine.built_for_gpu:
        device = "CPU; built for GPUs too, but none was found"
    else:
        device = "CPU; built without GPU support"
    if not engine.cudnn:
        cudnn = "not registered: cudnn_LSTM cannot be built"
    elif engine.gpus:
        cudnn = "registered, can run"
    else:
        cudnn = "registered, cannot run without a GPU: cudnn_LSTM can be built only"
    return [
        ("device", device),
        ("ATen", "there" if engine.aten else "not there"),
        ("cuDNN", cudnn),
        ("Gloo", "there" if engine.gloo else "not there: no training over several processes"),
    ]


def _products(gain: mkl_dispatch.Gain) -> str:
    variable = f"{mkl_dispatch.VARIABLE}={gain.value}"
    return f"MKL's, {gain.times:.1f} times as fast with {variable} in the environment (docs/optimize.md)"


def _openmp(withholding: str) -> str:
    return f"may give fewer threads than it says, by {withholding}: optimize does without oneDNN"


def _graphviz(report: Report) -> str:
    package = "package there" if report.graphviz else "package not there"
    program = f"program dot in {report.dot}" if report.dot else "program dot not there"
    return f"{package}, {program} (only for drawings)"


def _networks(trial: Trial) -> str:
    if trial.trouble is not None:
        return f"FAILED: {trial.trouble}"
    return (
        f"an LSTM was built and ran: values within {trial.value_error:.0e} of numpy's, "
        f"gradient within {trial.slope_error:.2%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return 0 if networks can be built and run, else 1."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {installation.DOCTOR}", description="Report what this installation can do."
    )
    parser.parse_args(argv)
    report = examine()
    print(render(report))
    return 0 if report.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
