"""Debian systems in folders, to install packages in: a new root with debootstrap, or none if that is not permitted.

    with Root("bookworm", "python3-venv") as root:
        root.run("python3 -m venv /venv", files=["a.whl"])     # copies files into the folder /moe first
"""
import os
import re
import shutil
import subprocess
import tempfile

from suite import Skip

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CACHE = os.path.join(ROOT, "build/fresh/cache")
UNSHARE = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]


def mirror():
    """Return this machine's mirror of Debian, or "" for debootstrap's default."""
    listed = subprocess.run(["apt-get", "indextargets", "--format", "$(COMPONENT) $(REPO_URI)", "Created-By: Packages"],
                            capture_output=True, text=True).stdout
    return next((line.split()[1] for line in listed.splitlines() if re.fullmatch(r"main \S+/debian/?", line)), "")


class Root:
    def __init__(self, suite, packages=""):
        self.suite, self.packages, self.folder = suite, packages, None

    def __enter__(self):
        mounts = os.geteuid() == 0 and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0
        if not mounts or not shutil.which("debootstrap"):
            if os.environ.get("CI") and not os.geteuid():
                raise RuntimeError("no debootstrap, or mounts are not permitted here")
            raise Skip("a new root requires root, debootstrap (tools/install-deps --fresh) and mounts")
        os.makedirs(CACHE, exist_ok=True)
        self.folder = tempfile.mkdtemp(prefix=self.suite + "-", dir=os.path.join(ROOT, "build/fresh"))
        os.chmod(self.folder, 0o755)
        include = [f"--include={self.packages}"] if self.packages else []
        command = ["debootstrap", "--variant=minbase", f"--cache-dir={CACHE}", *include, self.suite, self.folder]
        made = subprocess.run([*command, *filter(None, [mirror()])], capture_output=True, text=True, timeout=900)
        if made.returncode:
            self.__exit__()
            raise RuntimeError(f"debootstrap {self.suite}: {made.stdout[-800:]}")
        return self

    def __exit__(self, *_):
        subprocess.run(["rm", "-rf", "--one-file-system", self.folder], check=True)

    def run(self, command, status=0, files=(), **environment):
        """Run a shell command without a network; return its output and messages."""
        os.makedirs(self.folder + "/moe", exist_ok=True)
        for path in files:
            shutil.copy(path, self.folder + "/moe")
        words = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8"]
        words += [*map("=".join, environment.items()), "sh", "-c", command]
        inside = 'mount -t proc proc "$1/proc" && cd / && root=$1 && shift && exec chroot "$root" env -i "$@"'
        done = subprocess.run([*UNSHARE, "--net", "sh", "-c", inside, "sh", self.folder, *words],
                              capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
        assert done.returncode == status, (self.suite, command, done.returncode, (done.stdout + done.stderr)[-1500:])
        return done.stdout + done.stderr

    def files(self):
        """Return the paths of all files, for comparisons."""
        return {os.path.relpath(os.path.join(folder, name), self.folder) for folder, folders, names in
                os.walk(self.folder) for name in folders + names if not folder.startswith(self.folder + "/moe")}
