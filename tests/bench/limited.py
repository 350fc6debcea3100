#!/usr/bin/env python3
"""Run a command with limited memory and, optionally, a slower disk.

    sudo tests/bench/limited.py --memory 8G --drop model.bin -- \\
        ./moe-bench -m model.bin --expert-memory 4G --batch 1

The command runs in its own memory cgroup, which includes page cache. --drop
first evicts files from the page cache, because pages cached before would not
count. --times 2 runs the command again in the same group: it then rereads from
disk only what the limit has evicted. --disk 900M limits the bandwidth of the
disk that has the first --drop file.

Prints a JSON object for each run: seconds, processor seconds, exit status, peak
memory of the group so far (including page cache), peak memory of the process,
and bytes read from disk. The command's own output goes to standard error.
Requires root and Linux cgroups, version 1 or 2.
"""
import argparse
import json
import os
import resource
import subprocess
import sys
import time

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text):
    """Return the number of bytes of a size such as 8G (8 x 2^30)."""
    unit = UNITS.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if unit > 1 else text) * unit)


def files_of_group():
    """Return (parent folder of memory groups, name of the limit's file, name of the peak's file)."""
    if os.path.exists("/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        return "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"
    with open("/sys/fs/cgroup/cgroup.subtree_control", "w", encoding="ascii") as file:
        file.write("+memory")
    return "/sys/fs/cgroup", "memory.max", "memory.peak"


def slower_disk(group, path, speed):
    """Limit a group's reads from a file's disk; return the folder of the limit (`group` in version 2)."""
    number = os.stat(path).st_dev
    block = os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if os.path.exists(block + "/partition"):
        block = os.path.dirname(block)
    with open(block + "/dev", encoding="ascii") as file:
        device = file.read().strip()
    limit, value = os.path.join(group, "io.max"), f"rbps={speed}"
    if os.path.exists("/sys/fs/cgroup/blkio"):
        group = "/sys/fs/cgroup/blkio/" + os.path.basename(group)
        os.mkdir(group)
        limit, value = group + "/blkio.throttle.read_bps_device", speed
    else:
        with open("/sys/fs/cgroup/cgroup.subtree_control", "w", encoding="ascii") as file:
            file.write("+io")
    with open(limit, "w", encoding="ascii") as file:
        file.write(f"{device} {value}")
    return group


def drop(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(command, groups):
    """Run the command, which enters the groups before exec; return the measurements."""
    def enter():
        for group in groups:
            with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as file:
                file.write(str(os.getpid()))
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=enter)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # the process has ended, but is in /proc until wait()
    with open(f"/proc/{process.pid}/io", encoding="ascii") as file:
        read = next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
    status = process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"status": status, "seconds": round(time.monotonic() - begin, 2),
            "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
            "peak_process_mb": round(after.ru_maxrss / 1024, 1), "read_mb": round(read / 1e6, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=size, required=True, help="limit of the group, such as 8G")
    parser.add_argument("--drop", nargs="+", default=[], metavar="FILE", help="evict from the page cache first")
    parser.add_argument("--disk", type=size, metavar="SPEED", help="bytes a second of the disk, such as 900M")
    parser.add_argument("--times", type=int, default=1, help="runs, one after the other")
    parser.add_argument("command", nargs="+")
    o = parser.parse_args()
    if o.disk and not o.drop:
        parser.error("--disk requires --drop, which names the disk")
    parent, limit, peak = files_of_group()
    group = os.path.join(parent, f"moe-limited-{os.getpid()}")
    os.mkdir(group)
    groups = {group}
    try:
        if o.disk:
            groups.add(slower_disk(group, o.drop[0], o.disk))
        with open(os.path.join(group, limit), "w", encoding="ascii") as file:
            file.write(str(o.memory))
        for path in o.drop:
            drop(path)
        for _ in range(o.times):
            found = run(o.command, groups)
            with open(os.path.join(group, peak), encoding="ascii") as file:
                found["peak_group_mb"] = round(int(file.read()) / (1 << 20), 1)
            print(json.dumps(found), flush=True)
    finally:
        for group in groups:
            os.rmdir(group)
    return found["status"] != 0


if __name__ == "__main__":
    sys.exit(main())
