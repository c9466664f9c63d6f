"""README, Makefile and CI agree with each other and with the tree."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def test_links_of_all_documents_exist() -> None:
    documents = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    links = [
        (document, link)
        for document in documents
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8"))
        if "://" not in link
    ]
    assert links
    for document, link in links:
        assert (document.parent / link).exists(), f"{document.name} links {link}"


def test_make_targets_named_in_the_readme_exist() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)", README)) - {"model"}
    assert {"demo", "test"} <= named
    assert named <= TARGETS


def test_every_target_is_phony_and_explained() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(phony.split()) == TARGETS
    assert set(re.findall(r"^([a-z-]+):.*## \S", MAKEFILE, re.MULTILINE)) == TARGETS


def test_paths_of_the_layout_exist_and_no_package_is_missing() -> None:
    (block,) = re.findall(r"## Layout\n+```text\n(.*?)```", README, re.DOTALL)
    named = [line.split()[0] for line in block.splitlines() if line.strip()]
    for path in named:
        assert (ROOT / path).exists(), path
    packages = {
        f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / "vllm_moe_ep").rglob("__init__.py")
    }
    assert packages - set(named) <= {"vllm_moe_ep/adapters/"}


def test_ci_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make test$", script.read_text(), re.MULTILINE)
    assert re.search(r"^make test\b", README, re.MULTILINE)
