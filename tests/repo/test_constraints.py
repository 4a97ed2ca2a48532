"""`constraints.txt` names one version of each package for every supported Python."""

import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT

LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_every_package_has_one_version(python):
    chosen: dict[str, str] = {}
    for line in LINES:
        requirement = Requirement(line)
        environment = {"python_version": python, "python_full_version": f"{python}.0"}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert requirement.name not in chosen
            chosen[requirement.name] = str(requirement.specifier)
    assert set(chosen) == {Requirement(line).name for line in LINES}
    assert all(version.startswith("==") for version in chosen.values())
