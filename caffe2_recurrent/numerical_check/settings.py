"""How closely and at how many places gradients are compared."""

from typing import Any, NamedTuple, Optional

from caffe2_recurrent.arguments import is_integer, read_number
from caffe2_recurrent.problems import Problems, given

# Of numpy's RandomState.
MOST_SEED = 2**32 - 1


class Settings(NamedTuple):
    rtol: float
    atol: Optional[float]
    step: float
    most_elements: int
    seed: int


def check_settings(settings: Settings, types: Problems, problems: Problems) -> None:
    for name in ("rtol", "atol", "step"):
        value: Any = getattr(settings, name)
        number = None if name == "atol" and value is None else read_number(name, value, types, problems)
        if number is not None and number < 0:
            problems.add("{} must be 0 or more; got {}", name, value)
        elif number == 0 and name == "step":
            problems.add("step must be more than 0; got 0")
    for name, least in (("most_elements", 1), ("seed", 0)):
        value = getattr(settings, name)
        if not is_integer(value):
            types.add("{} must be a whole number; got {}", name, given(value))
        elif value < least:
            problems.add("{} must be {} or more; got {}", name, least, value)
        elif name == "seed" and value > MOST_SEED:
            problems.add("seed must be {} or less; got {}", MOST_SEED, value)
