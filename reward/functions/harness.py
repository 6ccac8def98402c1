"""Runs a solution and its tests; inside of the sandbox, see `unit_tests.py`.

Lines go to the standard output that the process began with, each after a word that only this process
was told: for each item of the list how many tests it holds, and for each test that ends `ok` or what
went wrong. A solution that ends the process, or prints what it likes, has passed nothing by that. It
shares the interpreter with its tests, though: one that goes looking for this code can find the word.
"""

import json
import os
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any

SHOWN = 300

Test = Callable[[], None]


def main() -> None:
    asked = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    os.dup2(2, 1)

    def tell(kind: str, what: object) -> None:
        os.write(report, f"{asked['word']} {kind} {what}\n".encode())

    solve = cache(partial(module, asked["code"]))
    for item in asked["tests"]:
        tests = tests_of(item, asked["code"], solve)
        tell("holds", len(tests))
        for test in tests:
            tell("test", outcome(test))
    sys.stdout.flush()
    os._exit(0)  # threads that the solution left behind are not waited for


def outcome(test: Test) -> str:
    try:
        test()
    except BaseException as error:  # a test that exits has not passed
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return text[:SHOWN].replace("\n", " ")
    return "ok"


def tests_of(item: Any, code: str, solve: Callable[[], dict[str, Any]]) -> list[Test]:
    """An input, or the functions and cases that a text of Python defines; else that is one test.
    The solution is run once for all tests of the second kind, and anew for each input."""
    if isinstance(item, dict):
        return [partial(program, code, item["input"], item["output"])]
    try:
        solved = solve()
        namespace = dict(solved)
        exec(compile(item, "tests.py", "exec"), namespace)
    except BaseException as error:
        return [partial(fail, error)]
    return list(defined(namespace, solved)) or [lambda: None]


def fail(problem: BaseException) -> None:
    raise problem


def module(code: str, name: str = "solution") -> dict[str, Any]:
    """A real module, which tests can import, and dataclasses and pickle look for."""
    made = sys.modules[name] = ModuleType(name)
    exec(compile(code, "solution.py", "exec"), made.__dict__)
    return made.__dict__


def defined(namespace: dict[str, Any], solved: dict[str, Any]) -> Iterator[Test]:
    for name, value in list(namespace.items()):
        if solved.get(name) is value:
            continue
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for case in unittest.defaultTestLoader.loadTestsFromTestCase(value):
                yield case.debug
        elif name.startswith("test") and callable(value):
            yield value


def program(code: str, given: str, expected: str) -> None:
    """The solution as a program that reads its input and prints; ends of lines do not count."""
    with redirected(given) as printed:
        try:
            module(code, "__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    assert lines(printed[0]) == lines(expected), "the output differs"


@contextmanager
def redirected(given: str) -> Iterator[list[str]]:
    """Real files, since programs read and write them in many ways: input(), open(0), os.read()."""
    before = sys.stdin, sys.stdout, os.dup(0), os.dup(1)
    into, out = os.memfd_create("input"), os.memfd_create("output")
    os.write(into, given.encode())
    os.lseek(into, 0, os.SEEK_SET)
    os.dup2(into, 0)
    os.dup2(out, 1)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    printed: list[str] = []
    try:
        yield printed
        sys.stdout.flush()
        os.lseek(out, 0, os.SEEK_SET)
        with open(out, errors="replace", closefd=False) as file:
            printed.append(file.read())
    finally:
        sys.stdin, sys.stdout, *old = before
        for number, descriptor in enumerate(old):
            os.dup2(descriptor, number)  # the program may have closed it
        for descriptor in (into, out, *old):
            os.close(descriptor)


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


if __name__ == "__main__":
    main()
