"""What `gradcheck` found, blob by blob."""

from typing import List, NamedTuple, Tuple

HEADINGS: Tuple[str, ...] = (
    *("blob", "role", "checked", "worst element"),
    *("analytic", "numerical", "difference", "allowed", ""),
)


class BlobCheck(NamedTuple):
    """The gradient of one blob; the worst element is that where the two gradients are farthest apart.

    `disagreement` is how far apart two numerical gradients of different step are there: large near a kink. Of
    `near_kinks` elements the numerical gradient is one of smaller steps, since it agrees and that of others does not.
    """

    blob: str
    role: str
    checked: int
    elements: int
    worst: Tuple[int, ...]
    analytic: float
    numerical: float
    allowed: float
    disagreement: float
    missing: bool
    near_kinks: int = 0

    @property
    def difference(self) -> float:
        return abs(self.analytic - self.numerical)

    @property
    def passes(self) -> bool:
        # False for a difference that is no number.
        return self.difference <= self.allowed


class GradientReport:
    """One `BlobCheck` for each blob, worst first. `print` it for a table."""

    def __init__(self, checks: List[BlobCheck]) -> None:
        self.checks = sorted(checks, key=_excess, reverse=True)

    @property
    def passes(self) -> bool:
        return all(check.passes for check in self.checks)

    @property
    def worst(self) -> BlobCheck:
        """The blob that comes closest to its limit, or is farthest beyond it."""
        return self.checks[0]

    def __str__(self) -> str:
        rows = [HEADINGS, *map(_row, self.checks)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join(lines + [note for check in self.checks for note in _notes(check)])


def _excess(check: BlobCheck) -> float:
    if check.passes:
        return check.difference / check.allowed if check.allowed else 0.0
    excess = check.difference / check.allowed if check.allowed else float("inf")
    return float("inf") if excess != excess else excess


def _row(check: BlobCheck) -> Tuple[str, ...]:
    return (
        check.blob,
        check.role,
        "{} of {}".format(check.checked, check.elements),
        "[{}]".format(", ".join(map(str, check.worst))),
        "{:.6g}".format(check.analytic),
        "{:.6g}".format(check.numerical),
        "{:.2g}".format(check.difference),
        "{:.2g}".format(check.allowed),
        "ok" if check.passes else "WRONG",
    )


def _notes(check: BlobCheck) -> List[str]:
    notes = []
    if check.near_kinks:
        notes.append(
            "'{}': {} of the checked elements agree by smaller steps only, as near a kink (Relu, Max) or in a "
            "sharp bend.".format(check.blob, check.near_kinks)
        )
    if check.passes:
        return notes
    if check.missing:
        notes.append("'{}' gets no gradient, so zero was compared.".format(check.blob))
    if check.disagreement > check.allowed:
        notes.append(
            "'{}': two steps give numerical gradients {:.2g} apart at {}. If the net has a kink there (Relu, Max), "
            "check at other values; else try a smaller step.".format(check.blob, check.disagreement, list(check.worst))
        )
    return notes
