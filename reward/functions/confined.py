"""Runs an untrusted Python program; the inside of `sandbox.py`.

Started as a script by its path, with its options as JSON in one argument; it imports nothing of ours.
It gives up for good, step by step, what the program must not have, then runs the program in place:

1. Limits: memory, processor time, size and number of files.
2. The network: by a user and network namespace of its own without an active interface, by a filter
   that refuses socket(), or by both.
3. Files, by Landlock if the kernel has it: the program reads only Python and the system's libraries
   and writes only to its own folder. This also hides all other processes from debuggers and /proc.
4. Capabilities: none, also for root.
5. System calls, by a filter: no further processes (so killing this one kills everything, and the
   memory limit is total), no signals, limits or priorities for other processes, no change of file
   permissions, which Landlock would allow, and no shared memory that would outlive it.

Only then is `READY` written. A step that fails ends the process before that.
"""

import ctypes
import errno
import json
import os
import resource
import struct
import sys
from types import CodeType

READY = b"ready\n"
MIB = 1 << 20
MAX_FILES = 64
CLONE_NEWUSER, CLONE_NEWNET, CLONE_THREAD = 0x10000000, 0x40000000, 0x00010000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_CAPBSET_DROP = 38, 22, 24
SECCOMP_MODE_FILTER = 2

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    program = _compile(options["program"])
    limit(options["memory_mb"], options["cpu_s"], options["file_mb"])
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if options["namespace"]:
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNET)
    if options["landlock"]:
        restrict_files(options["folder"], options["readable"])
    drop_capabilities()
    refuse_calls(sockets=options["seccomp"])
    os.write(1, READY)
    sys.argv = ["program"]
    exec(program, {"__name__": "__main__", "__builtins__": __builtins__})


def _compile(file: str) -> CodeType:
    """Called before the file is out of reach."""
    with open(file) as source:  # noqa: PTH123 - pathlib is not imported, to start fast
        return compile(source.read(), file, "exec")


def _call(name: str, *arguments: object) -> int:
    longs = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    result: int = getattr(libc, name)(*longs)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def limit(memory_mb: int, cpu_s: int, file_mb: int) -> None:
    """Without RLIMIT_NPROC: it counts all processes of the user, and root is exempt."""
    for kind, maximum in [
        (resource.RLIMIT_AS, memory_mb * MIB),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, file_mb * MIB),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_CORE, 0),
    ]:
        hard = resource.getrlimit(kind)[1]
        maximum = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
        resource.setrlimit(kind, (maximum, maximum))


# Files: https://docs.kernel.org/userspace-api/landlock.html

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
READS = EXECUTE | READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights, by the version of the interface that introduced them."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def landlock_version() -> int:
    """0 if the kernel has no Landlock."""
    return max(0, int(libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))))


def restrict_files(folder: str, readable: list[str]) -> None:
    version = landlock_version()
    known = max(count for since, count in RIGHTS.items() if since <= version)
    rights = (1 << known) - 1
    scoped = 0b11 if version >= 6 else 0  # abstract sockets and signals
    sizes = {1: 8, 4: 16, 6: 24}
    size = max(n for since, n in sizes.items() if since <= version)
    handled = struct.pack("=QQQ", rights, 0, scoped)[:size]
    rules = _call("syscall", LANDLOCK_CREATE, handled, len(handled), 0)
    _allow(rules, folder, rights)
    for path in readable:
        _allow(rules, path, rights & READS)
    for path in DEVICES:
        _allow(rules, path, rights & (READ_FILE | WRITE_FILE))
    _call("syscall", LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH)
    except OSError:
        return  # a path that is missing or unreachable needs no rule
    rights = rights if os.path.isdir(path) else rights & OF_FILES  # noqa: PTH112
    rule = struct.pack("=Qi", rights, descriptor)
    _call("syscall", LANDLOCK_ADD, rules, 1, rule, 0)
    os.close(descriptor)


# Capabilities

CAPABILITY_VERSION = 0x20080522


def drop_capabilities() -> None:
    """Also from the bounding set, or root would get them back after an exec."""
    for number in range(64):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) < 0:
            break  # there are no more, or the process had none to drop
    _call("capset", struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24))


# System calls: https://docs.kernel.org/userspace-api/seccomp_filter.html

LOAD, EQUAL, ABOVE, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
X32 = 0x40000000
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COMMON = {"clone3": 435, "io_uring_setup": 425, "pidfd_send_signal": 424, "fchmodat2": 452}
COMMON |= {"pidfd_getfd": 438, "setxattrat": 463, "removexattrat": 466, "file_setattr": 469}
X86_64 = COMMON | {
    "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "socket": 41, "clone": 56,
    "fork": 57, "vfork": 58, "kill": 62, "chmod": 90, "fchmod": 91,
    "chown": 92, "fchown": 93, "lchown": 94, "ptrace": 101, "rt_sigqueueinfo": 129, "utime": 132,
    "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144, "setxattr": 188,
    "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
    "fremovexattr": 199, "tkill": 200, "sched_setaffinity": 203, "tgkill": 234, "utimes": 235,
    "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251, "fchownat": 260,
    "futimesat": 261, "fchmodat": 268, "unshare": 272, "move_pages": 279, "utimensat": 280,
    "migrate_pages": 256, "rt_tgsigqueueinfo": 297, "prlimit64": 302, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "sched_setattr": 314,
}  # fmt: skip
AARCH64 = COMMON | {
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15,
    "fremovexattr": 16, "ioprio_set": 30, "fchmod": 52, "fchmodat": 53, "fchownat": 54,
    "fchown": 55, "utimensat": 88, "unshare": 97, "ptrace": 117, "sched_setparam": 118,
    "sched_setscheduler": 119, "sched_setaffinity": 122, "kill": 129, "tkill": 130, "tgkill": 131,
    "rt_sigqueueinfo": 138, "setpriority": 140, "socket": 198, "add_key": 217, "request_key": 218,
    "keyctl": 219, "clone": 220, "migrate_pages": 238, "move_pages": 239, "rt_tgsigqueueinfo": 240,
    "prlimit64": 261, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
    "sched_setattr": 274, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194,
}  # fmt: skip
CALLS = {"x86_64": X86_64, "aarch64": AARCH64}
ON_ITSELF = {
    "kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "prlimit64", "sched_setaffinity",
    "sched_setparam", "sched_setscheduler", "sched_setattr",
}  # fmt: skip
"""Allowed on this process: their first argument is a process."""
ABSENT = ("clone3", "io_uring_setup", "fchmodat2", "setxattrat", "removexattrat")
"""Refused with ENOSYS, so that libraries use the older call, whose arguments can be filtered."""


def refuse_calls(sockets: bool) -> None:
    machine = os.uname().machine
    code = b"".join(_filter(MACHINES[machine], CALLS[machine], sockets))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)


def _filter(machine: int, calls: dict[str, int], sockets: bool) -> list[bytes]:
    lines = [_op(LOAD, MACHINE), _op(EQUAL, machine, 1, 0), _op(RETURN, KILL), _op(LOAD, NUMBER)]
    # x86_64 has a second set of numbers, for 32-bit pointers; nothing uses it.
    lines += [_op(ABOVE, X32, 0, 1), _op(RETURN, REFUSE | errno.ENOSYS)]
    for name, number in calls.items():
        if name == "clone":
            lines += _unless(number, [_op(HAS_BITS, CLONE_THREAD, 0, 1)])
        elif name in ON_ITSELF:
            lines += _unless(number, [_op(EQUAL, 0, 1, 0), _op(EQUAL, os.getpid(), 0, 1)])
        elif name != "socket" or sockets:
            error = errno.ENOSYS if name in ABSENT else errno.EPERM
            lines += [_op(EQUAL, number, 0, 1), _op(RETURN, REFUSE | error)]
    return [*lines, _op(RETURN, ALLOW)]


def _unless(number: int, tests: list[bytes]) -> list[bytes]:
    """Refuses the call unless the last test of its first argument falls through to the next line."""
    block = [_op(LOAD, FIRST_ARGUMENT), *tests, _op(RETURN, ALLOW)]
    block.append(_op(RETURN, REFUSE | errno.EPERM))
    return [_op(EQUAL, number, 0, len(block)), *block]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


if __name__ == "__main__":
    main()
