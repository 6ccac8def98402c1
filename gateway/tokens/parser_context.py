"""The ids of a prompt that an engine's parser needs while it reads a streamed answer.

The parser keeps no state between the parts of an answer, so the prompt goes with every part. All that
the parser looks for is whether the prompt ends inside the model's reasoning. The last markers decide
that (`<think>`, `</think>`, a channel), wherever they are: a long tool result may lie behind them.
Markers are tokens of the added vocabulary, sometimes with an ordinary word between two of them. And to
decode the first sampled id, the parser needs the ids before it.

So the end of the prompt, and the last markers with their neighbours, stand for the whole prompt: a few
hundred ids instead of a hundred thousand.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

END = 256
"""Ids at the end that are kept as they are; the template's opening of the answer is much shorter."""
OCCURRENCES = 8
"""Of each marker: some differ only in the word after them."""
NEIGHBOURS = 4


def parser_context(prompt: Sequence[int], markers: Collection[int]) -> list[int]:
    """A short prompt that leaves a parser in the same state as this one."""
    start_of_end = max(len(prompt) - END, 0)
    kept = sorted(
        {
            near
            for at in _last_markers(prompt, start_of_end, markers)
            for near in range(max(at - NEIGHBOURS, 0), min(at + NEIGHBOURS + 1, start_of_end))
        }
    )
    return [*(prompt[at] for at in kept), *prompt[start_of_end:]]


def _last_markers(prompt: Sequence[int], end: int, markers: Collection[int]) -> Iterator[int]:
    """Where the last occurrences of each marker are, before `end`."""
    seen: Counter[int] = Counter()
    for at in range(end - 1, -1, -1):
        token = prompt[at]
        if token in markers:
            seen[token] += 1
            if seen[token] <= OCCURRENCES:
                yield at
