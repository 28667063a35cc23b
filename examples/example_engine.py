"""The engine: how it is started, and the seeds of what it draws."""

from caffe2.python import core, workspace


def initialise_engine(threads: int = 1) -> None:
    """Starts the engine; a process can do so once, and only the first call sets the number of threads."""
    # Level 3 keeps the engine's own error lines off the terminal; each of them also arrives as an exception.
    # The RNN executor has a race that fails a run once in a million or so, and training is no faster with it here.
    options = ["--caffe2_log_level=3", "--caffe2_rnn_executor=0"]
    if threads > 1:
        options += ["--caffe2_{}_num_threads={}".format(library, threads) for library in ("omp", "mkl")]
    workspace.GlobalInit(["caffe2", *options])


def seed_operators(net: core.Net, seed: int) -> None:
    """Gives each operator of `net` a seed of its own; one for all would draw the same numbers in each."""
    for number, operator in enumerate(net.Proto().op):
        operator.device_option.random_seed = (seed + number) % 2**32
