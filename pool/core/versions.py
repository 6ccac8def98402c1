"""The name of a run's weights, as the trainer labels engines and gateways read it."""

from typing import NamedTuple, Self


class Version(NamedTuple):
    """Weights of a run, written `incarnation.version`."""

    incarnation: int
    number: int

    @classmethod
    def parse(cls, label: str) -> Self | None:
        """None: weights that no trainer of ours has sent, such as those that vLLM starts with."""
        incarnation, _, number = label.partition(".")
        if not (incarnation.isdecimal() and number.isdecimal()):
            return None
        return cls(int(incarnation), int(number))

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"
