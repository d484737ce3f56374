"""What the documents say is what the code does."""

import dataclasses
import re
from pathlib import Path

import pytest
from nereus_openrlhf.capabilities import all_refusals

from nereus_plugins.controller.config import ControllerConfig
from nereus_plugins.sim.constants import BASIS, Constants

ROOT = Path(__file__).resolve().parents[2]


def test_every_refusal_is_on_the_support_page() -> None:
    capabilities = pytest.importorskip(
        "nereus_verl.capabilities", reason="needs omegaconf (verl environment)"
    )
    page = (ROOT / "docs" / "support.md").read_text()
    for refusal in capabilities.all_refusals():
        row = f"| {refusal.feature} | `{refusal.setting}` | {refusal.reason} | {refusal.remedy} |"
        assert row in page


def test_every_refusal_of_openrlhf_is_on_its_page() -> None:
    page = (ROOT / "docs" / "openrlhf.md").read_text()
    for one in all_refusals():
        assert f"| {one.feature} | `{one.setting}` | {one.reason} | {one.remedy} |" in page


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/ab.md",
        "recipes/ab/README.md",
        "docs/architecture.md",
        "docs/control.md",
        "docs/controller.md",
        "docs/openrlhf.md",
        "docs/snapshots.md",
        "docs/verl-controller.md",
        "docs/traces.md",
        "docs/simulator.md",
        "docs/vllm.md",
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" not in link:
            assert ((ROOT / page).parent / link.split("#")[0]).exists(), f"{page}: {link}"


def test_the_simulators_constants_are_on_its_page() -> None:
    page = (ROOT / "docs" / "simulator.md").read_text()
    for name, basis in BASIS.items():
        value = getattr(Constants(), name)
        assert f"| `{name}` | {value:g} | {basis.kind} | {basis.source} |" in page


def test_the_controllers_defaults_are_on_its_page() -> None:
    page = (ROOT / "docs" / "controller.md").read_text()
    for field in dataclasses.fields(ControllerConfig):
        assert f"| `{field.name}` | {field.default} |" in page
