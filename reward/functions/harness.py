"""Runs a solution and its tests inside the sandbox; see `unit_tests.py`.

The report goes to the original standard output. Each line begins with a secret that only this process
got: for each item of the list the number of its tests (`holds`), and for each finished test `ok` or the
error (`test`). So a solution that exits, or prints anything, passes no test by that. It does share the
interpreter with its tests: a solution that searches for this code can find the secret.
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

MAX_ERROR = 300

Test = Callable[[], None]


def main() -> None:
    task = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    os.dup2(2, 1)

    def write_line(kind: str, content: object) -> None:
        os.write(report, f"{task['secret']} {kind} {content}\n".encode())

    solve = cache(partial(run_as_module, task["code"]))
    for item in task["tests"]:
        tests = tests_of(item, task["code"], solve)
        write_line("holds", len(tests))
        for test in tests:
            write_line("test", run_test(test))
    sys.stdout.flush()
    os._exit(0)  # threads that the solution left behind are not waited for


def run_test(test: Test) -> str:
    try:
        test()
    except BaseException as error:  # a test that exits has not passed
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return text[:MAX_ERROR].replace("\n", " ")
    return "ok"


def tests_of(item: Any, code: str, solve: Callable[[], dict[str, Any]]) -> list[Test]:
    """The test of an input and its output; or the test functions and cases that Python code defines,
    else the code itself. The solution is run once for all Python tests, and again for each input."""
    if isinstance(item, dict):
        return [partial(check_program, code, item["input"], item["output"])]
    try:
        solution = solve()
        namespace = dict(solution)
        exec(compile(item, "tests.py", "exec"), namespace)
    except BaseException as error:
        return [partial(raise_error, error)]
    return list(defined_tests(namespace, solution)) or [lambda: None]


def raise_error(error: BaseException) -> None:
    raise error


def run_as_module(code: str, name: str = "solution") -> dict[str, Any]:
    """Runs the code as a real module, which tests can import and which dataclasses and pickle need."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(code, "solution.py", "exec"), module.__dict__)
    return module.__dict__


def defined_tests(namespace: dict[str, Any], solution: dict[str, Any]) -> Iterator[Test]:
    for name, value in list(namespace.items()):
        if solution.get(name) is value:
            continue  # the solution defines it, not the tests
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for case in unittest.defaultTestLoader.loadTestsFromTestCase(value):
                yield case.debug
        elif name.startswith("test") and callable(value):
            yield value


def check_program(code: str, stdin: str, expected: str) -> None:
    """Runs the solution as a program and compares what it prints, ignoring trailing whitespace."""
    with redirected(stdin) as printed:
        try:
            run_as_module(code, "__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
    assert stripped_lines(printed[0]) == stripped_lines(expected), "the output differs"


@contextmanager
def redirected(stdin: str) -> Iterator[list[str]]:
    """Redirects standard input and output to real files, since programs use them in many ways: input(),
    open(0), os.read(). The list gets the output at the end."""
    before = sys.stdin, sys.stdout, os.dup(0), os.dup(1)
    into, out = os.memfd_create("input"), os.memfd_create("output")
    os.write(into, stdin.encode())
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


def stripped_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


if __name__ == "__main__":
    main()
