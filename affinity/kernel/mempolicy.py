"""set_mempolicy(2) and get_mempolicy(2), without libnuma, a package more for two system calls."""

import ctypes
import errno
import os
import platform

SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
POLICIES = {"default": 0, "preferred": 1, "bind": 2, "interleave": 3}
MAX_NODES = 1024
WORD_BITS = 64
FORBIDDEN = (errno.ENOSYS, errno.EPERM)


def set_memory_policy(policy: str, nodes: tuple[int, ...]) -> str | None:
    """Set this process's memory policy, which survives exec. Returns the kernel's reason where it refuses."""
    number = SYSCALLS.get(platform.machine(), (None, None))[0]
    if number is None:
        return f"no set_mempolicy known on {platform.machine()}"
    if any(node >= MAX_NODES for node in nodes):
        return os.strerror(errno.EINVAL)  # more than any kernel has
    words = (ctypes.c_ulong * (MAX_NODES // WORD_BITS))()
    for node in nodes:
        words[node // WORD_BITS] |= 1 << node % WORD_BITS
    mask = words if nodes else None
    if _libc().syscall(number, POLICIES[policy], mask, MAX_NODES + 1 if nodes else 0) == 0:
        return None
    code = ctypes.get_errno()
    if policy == "default" and code in FORBIDDEN:
        return None  # a kernel without policies has the default one
    return os.strerror(code)


def forbids_default_policy() -> bool:
    """Whether the kernel refuses to set a memory policy. To find out this sets the default one: call it only where the
    process has that already, so that nothing changes."""
    number = SYSCALLS.get(platform.machine(), (None, None))[0]
    return number is None or _libc().syscall(number, POLICIES["default"], None, 0) != 0


def get_memory_policy() -> tuple[str | None, tuple[int, ...]]:
    """This process's memory policy and its nodes; None where the kernel forbids to ask (some containers)."""
    mode, words = ctypes.c_int(-1), (ctypes.c_ulong * (MAX_NODES // WORD_BITS))()
    number = SYSCALLS.get(platform.machine(), (None, None))[1]
    known = number is not None and _libc().syscall(number, ctypes.byref(mode), words, MAX_NODES + 1, None, 0) == 0
    name = next((name for name, value in POLICIES.items() if known and value == mode.value), None)
    return name, tuple(WORD_BITS * w + b for w, word in enumerate(words) for b in range(WORD_BITS) if word >> b & 1)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
