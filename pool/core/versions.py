"""Labels of weights: the trainer sets them on engines, and gateways read them back."""

from typing import NamedTuple, Self


class Version(NamedTuple):
    """A version of a run's weights, written `incarnation.version`."""

    incarnation: int
    number: int

    @classmethod
    def parse(cls, label: str) -> Self | None:
        """None if the weights did not come from a trainer, such as those that vLLM starts with."""
        incarnation, _, number = label.partition(".")
        if not (incarnation.isdecimal() and number.isdecimal()):
            return None
        return cls(int(incarnation), int(number))

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"
