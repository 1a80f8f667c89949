"""The isolation of a box from this machine: bubblewrap, or Landlock with seccomp alone.

Inside each of them ``zygote`` runs, which takes the rights of every piece of code away by Landlock and seccomp, too,
where the kernel has them. docs/security.md says what each isolates.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from services.core.errors import ConfigurationError
from services.sandbox import kernel

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
"""The directories and files of the system that programs need, read-only; those that do not exist are left out."""
OF_TREE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc")
"""The directories that a tree may have in place of the system's."""
BOX = "/box"
"""The directory of a bubblewrap box that code may write to."""
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; services = sys.modules['services'] = type(sys)('services'); "
    "services.__path__ = [sys.argv[1]]; from services.sandbox.zygote import main; main()"
)
"""Starts ``zygote`` without ``site`` and without this project's other modules, which would take most of the time."""
_DESCRIBE = (
    "import json, os, sys as s; library = os.path.dirname(os.__file__); "
    "print(json.dumps([s.version_info[:2], s.executable, library, s.prefix, s.base_prefix, *s.path]))"
)
_VARIABLES = "/etc/profile.d/container_env_var.sh"
"""The file into which SkyPilot writes the variables of a pod, which may be secrets."""
_EMPTY = str(ROOT / "services/py.typed")
_SANDBOX = str(ROOT / "services/sandbox")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_COPIES = Path("/var/tmp")
"""The directory for copies of interpreters that only root can reach; unlike /tmp it is rarely kept in memory."""
_OLDEST = (3, 11)
_SECONDS = 60


class BackendName(StrEnum):
    """The value of SANDBOX."""

    AUTO = "auto"
    BWRAP = "bwrap"
    LANDLOCK = "landlock"


AUTOMATIC = (BackendName.BWRAP, BackendName.LANDLOCK)
"""The backends, in the order in which ``auto`` tries them."""


@dataclass(frozen=True)
class Interpreter:
    """A Python for code in boxes: its program, where it looks for modules, and what it and programs need to read."""

    program: str
    library: str
    """The directory of Python's own modules."""
    path: tuple[str, ...]
    readable: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it needs."""
    tree: str = ""
    """The directory from which a box of bubblewrap has a system's directories; empty: it has this machine's."""
    search: str = ""
    """The PATH of programs, where another Python comes before this one; empty: this one comes first."""

    @classmethod
    def find(cls, path: str) -> Interpreter:
        """Ask an interpreter for its directories; ConfigurationError where it cannot be used."""
        executable, library, directories = _described([path], f"SANDBOX_PYTHON {path!r}")
        readable = _outermost([*SYSTEM, *directories, _SANDBOX])
        return cls(executable, library, tuple(directories[2:]), tuple(readable))

    @classmethod
    def find_in(cls, tree: Path, places: Sequence[str] = ()) -> Interpreter:
        """Ask the Python of a directory tree with the programs of a system, such as debootstrap makes.

        Args:
            tree: the directory.
            places: what boxes have of their own.

        Raises:
            ConfigurationError: the tree has no Python 3.11 that bubblewrap can start.
        """
        system = [path for path in (*OF_TREE, *_installed(tree, places)) if (tree / path[1:]).exists()]
        bound = [word for path in system for word in ("--ro-bind", f"{tree}{path}", path)]
        words = [shutil.which("bwrap") or "bwrap", "--unshare-all", *bound, "--dev", "/dev", "--setenv", "PATH", _PATH]
        executable, library, directories = _described([*words, "python3"], f"the Python of SANDBOX_TREES {str(tree)!r}")
        readable = (*system, _SANDBOX)
        return cls(executable, library, tuple(directories[2:]), readable, tree=str(tree))

    def in_image(self, image: str, places: Sequence[str]) -> Interpreter:
        """Return this interpreter for boxes with all programs of this machine, which is a container of an image.

        Programs find the image's own Python, if it has one; none of ``places`` is among the directories of programs.

        Args:
            image: the image's name, for messages.
            places: what boxes have of their own.

        Raises:
            ConfigurationError: the image's Python is older than 3.11.
        """
        own = os.path.dirname(self.program)
        folders = [
            folder
            for folder in os.environ.get("PATH", os.defpath).split(os.pathsep)
            if os.path.isabs(folder) and folder != own and not _is_in(os.path.realpath(folder), places)
        ]
        search = os.pathsep.join([*folders, own])
        found = shutil.which("python3", path=search)
        directories: list[str] = []
        if found and os.path.dirname(found) != own:
            _, library, directories = _described([found], f"the Python of the image {image}, {found},")
            directories = [path for path in (library, *directories) if not _is_in(path, places)]
        installed = _installed(Path("/"), [*places, str(ROOT)])
        readable = _outermost([*OF_TREE, *self.readable, *installed, *directories])
        return replace(self, readable=tuple(readable), search=search)

    def for_every_user(self) -> Interpreter:
        """Return this interpreter, or a copy that every user can read if this one is below a private directory.

        The copy is a virtual environment, made once for all programs of this machine, of hard links to the program, the
        libraries and the modules, or of copies where a link cannot be made. It is renamed into place when it is whole.

        Raises:
            OSError: it cannot be made.
        """
        names = [self.program, self.library, *(name for name in self.path if os.path.exists(name))]
        if all(map(is_open, names)):
            return self
        state = [(name, os.stat(name).st_mtime_ns) for name in names]
        copy = _COPIES / f"grpo-python-{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]}"
        library = copy / "lib" / Path(self.library).name
        private = [name for name in self.path if os.path.isdir(name) and not is_open(name)]
        places = {name: str(copy / f"packages-{index}") for index, name in enumerate(private)}
        inside = [name for name in self.path if Path(name).is_relative_to(self.library)]
        places |= {name: str(library / Path(name).relative_to(self.library)) for name in inside}
        path = tuple(places.get(name, name) for name in self.path)
        if not copy.exists():
            made = Path(tempfile.mkdtemp(prefix=f"{copy.name}.", dir=_COPIES))
            try:
                self._copy_to(made, copy, [(name, places[name]) for name in private if name not in inside], path)
                made.rename(copy)
            except OSError:
                if not copy.exists():  # else another program was quicker
                    raise
            finally:
                shutil.rmtree(made, ignore_errors=True)
        if copy.lstat().st_uid != os.geteuid() or not is_open(str(copy)):
            raise OSError(f"{copy} was not made by this user; remove it")
        readable = _outermost([*SYSTEM, str(copy), *path, _SANDBOX])
        variables = {"LD_LIBRARY_PATH": str(copy / "lib")}
        return Interpreter(str(copy / "environment/bin/python"), str(library), path, tuple(readable), variables)

    def _copy_to(self, made: Path, copy: Path, packages: list[tuple[str, str]], path: tuple[str, ...]) -> None:
        """Fill ``made``, which becomes ``copy``, with Python, its packages, and an environment that has ``path``."""
        source = Path(self.library)
        version = source.name
        # Its own packages are needed only where they are on the path.
        unneeded = {"test", "site-packages", "dist-packages"} - {
            Path(name).name for name in self.path if name.startswith(self.library)
        }
        _link_tree(source, made / "lib" / version, unneeded)
        for shared in source.parent.glob("*.so*"):
            _link(shared, made / "lib" / shared.name)
        for name, place in packages:
            _link_tree(Path(name), made / Path(place).name, set())
        environment = made / "environment"
        modules = environment / "lib" / version / "site-packages"
        for folder in (made / "bin", environment / "bin", modules):
            folder.mkdir(parents=True)
        _link(Path(os.path.realpath(self.program)), made / "bin" / version)
        for name in ("python", "python3"):
            (environment / "bin" / name).symlink_to(copy / "bin" / version)
        texts = {
            environment / "pyvenv.cfg": f"home = {copy / 'bin'}\n",
            modules / "path.pth": "".join(f"{name}\n" for name in path),
        }
        for file, text in texts.items():
            file.write_text(text, "utf-8")
            file.chmod(0o644)
        # Whatever the umask of this process is.
        for below, _, _ in os.walk(made):
            os.chmod(below, 0o755)


@dataclass(frozen=True)
class Layout:
    """Paths of its own for a box of bubblewrap, which is alone with them and with its network."""

    places: tuple[str, ...]
    """The directories that programs may write to, each in memory of its own; the first is where they begin."""
    mounts: Mapping[str, str] = field(default_factory=dict)
    """Files and directories of this machine that programs may read, by their paths in the box."""
    pipes: Mapping[str, str] = field(default_factory=dict)
    """Named pipes of this machine that programs may write to, by their paths in the box, in one of the places. They can
    neither be removed nor be replaced, nor can their modes be changed: none but regular files are read-only there.
    Where the box's user owns them, programs may not change the modes of their own files, either."""
    has_processes: bool = False
    """True if the box has /proc, with its own processes."""


def is_open(path: str) -> bool:
    """Return whether every user of this machine can read ``path``."""
    real = os.path.realpath(path)
    parents = {*Path(path).parents, *Path(real).parents}
    wanted = stat.S_IROTH | (stat.S_IXOTH if os.path.isdir(real) else 0)
    return os.stat(real).st_mode & wanted == wanted and all(parent.stat().st_mode & stat.S_IXOTH for parent in parents)


def _link_tree(source: Path, target: Path, unneeded: set[str]) -> None:
    """Copy a directory so that every user can read it, without the names in it that are ``unneeded``."""
    for folder, folders, files in os.walk(source):
        place = target / Path(folder).relative_to(source)
        place.mkdir(parents=True)
        if place == target:
            folders[:] = [name for name in folders if name not in unneeded]
        for name in folders:
            if (linked := Path(folder, name)).is_symlink():
                (place / name).symlink_to(linked.readlink())
        for name in files:
            _link(Path(folder, name), place / name)


def _link(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, or else a copy that every user can read."""
    mode = source.stat().st_mode if source.is_file() else 0
    if mode & stat.S_IROTH and not source.is_symlink():
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    if mode:
        shutil.copyfile(source, target)
        target.chmod(0o755 if mode & stat.S_IXUSR else 0o644)


def _described(words: list[str], where: str) -> tuple[str, str, list[str]]:
    """Return the program, the library and the directories of the Python that a command starts.

    Raises:
        ConfigurationError: it does not start, or is too old.
    """
    try:
        done = subprocess.run(
            [*words, "-sPc", _DESCRIBE], capture_output=True, text=True, timeout=_SECONDS, check=True, env={}
        )
        version, executable, library, *directories = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigurationError(f"{where} does not run ({error}); name a Python 3.11") from error
    if tuple(version) < _OLDEST:
        raise ConfigurationError(f"{where} is Python {version[0]}.{version[1]}; name a Python 3.11")
    return executable, library, directories


def _installed(root: Path, others: Sequence[str]) -> list[str]:
    """Return what is in /opt below a root; without links that leave the root, and what is above or below ``others``."""
    found = {f"/opt/{path.name}": path for path in sorted((root / "opt").glob("*")) if is_below(root, path)}
    return [name for name in found if not (_is_in(name, others) or any(_is_in(other, [name]) for other in others))]


def is_below(root: Path, path: Path) -> bool:
    """Return whether a path, with the links on it followed, is below ``root``."""
    return path.resolve().is_relative_to(root.resolve())


def _is_in(path: str, places: Sequence[str]) -> bool:
    return any(Path(path).is_relative_to(place) for place in places)


def _outermost(paths: list[str]) -> list[str]:
    """Return those of ``paths`` that exist and are not below another one."""
    existing = [Path(path) for path in dict.fromkeys(paths) if os.path.isabs(path) and os.path.exists(path)]
    return [str(path) for path in existing if not any(other in path.parents for other in existing)]


def command(backend: BackendName, interpreter: Interpreter, *, disk_mb: int, layout: Layout | None = None) -> list[str]:
    """Return the command of a box.

    Args:
        backend: what isolates it.
        interpreter: runs in it.
        disk_mb: the size of the directory that code may write to; 0: there is none. With a layout, of each place.
        layout: paths of its own.

    Raises:
        OSError: this machine does not have the backend, or it gives boxes no paths; the message says why.
    """
    zygote = [interpreter.program, "-sPS", "-c", _START, str(ROOT / "services"), *interpreter.path]
    if backend is BackendName.BWRAP:
        return [*_bubblewrap(interpreter, disk_mb, layout), *zygote]
    if layout is not None:
        raise OSError("a box with paths of its own needs SANDBOX=bwrap, because Landlock gives it no other paths")
    if not kernel.landlock_version():
        raise OSError(f"the kernel ({platform.release()}) has no Landlock, or its `lsm=` leaves it out")
    return zygote


def _bubblewrap(interpreter: Interpreter, disk_mb: int, layout: Layout | None) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise OSError("the program bwrap is missing; install the package bubblewrap")
    if layout and layout.has_processes and os.geteuid() != 0 and not kernel.landlock_version():
        raise OSError("a box with /proc needs Landlock or root: its programs could write to its first process's memory")
    arguments = [program, "--unshare-ipc", "--unshare-net", "--unshare-pid", "--unshare-uts", "--hostname", "box"]
    # Root takes no user namespace, so that it can give every box a user of its own, whose processes are counted.
    own = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
    arguments += ["--cap-drop", "ALL"]
    arguments += [word for name in own for word in ("--cap-add", name)] if os.geteuid() == 0 else ["--unshare-user"]
    for place in layout.places if layout else ():
        below = next((path for path in interpreter.readable if Path(path).is_relative_to(place)), None)
        if below and (os.geteuid() != 0 or below == place):
            # Its owner could put another one in its place.
            raise OSError(
                f"programs write to {place}, where {below} is; keep it elsewhere (SANDBOX_PYTHON, or the project)"
            )
        arguments += ["--perms", "1777", "--size", str(disk_mb * 2**20), "--tmpfs", place]
    bound = [*interpreter.readable, *(layout.mounts if layout else ())]
    parents = {str(parent): None for path in bound for parent in reversed(Path(path).parents[:-1])}
    for parent in parents:
        # Below /root, too, programs reach the interpreter, whose user is not root.
        arguments += ["--perms", "0755", "--dir", parent]
    for path in interpreter.readable:
        source = f"{interpreter.tree}{path}" if interpreter.tree and path != _SANDBOX else path
        arguments += ["--ro-bind", source, path]
    if interpreter.search and os.path.exists(_VARIABLES):
        arguments += ["--ro-bind", _EMPTY, _VARIABLES]
    arguments += ["--dev", "/dev", *(["--proc", "/proc"] if layout and layout.has_processes else [])]
    if disk_mb and layout is None:
        arguments += ["--perms", "0777", "--size", str(disk_mb * 2**20), "--tmpfs", BOX]
    for files in (layout.mounts, layout.pipes) if layout else ():
        arguments += [word for path, source in files.items() for word in ("--ro-bind", source, path)]
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/", "--new-session", "--chdir", "/"]
