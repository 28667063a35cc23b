"""What can go wrong that the user can do something about: each message is one line, which main() prints."""


class ExampleError(Exception):
    exit_code = 2


class CorpusError(ExampleError):
    """The corpus, or the dictionary, cannot be used."""


class CheckpointError(ExampleError):
    """The file cannot be read as a checkpoint, or is one of another run."""


class SetupError(ExampleError):
    """Something the program needs is not there."""


class WriteError(ExampleError):
    """A result could not be written."""

    exit_code = 1


class TrainingError(ExampleError):
    """Training came to nothing."""

    exit_code = 1


class WordError(ExampleError):
    """A word that the network cannot read."""
