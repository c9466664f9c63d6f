"""docs/static-ep.md lists the settings of the layer with their real defaults."""

import re
from pathlib import Path

from vllm_moe_ep.envs import VARIABLES

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "static-ep.md").read_text("utf-8")
# These are about the plugin and the platform, not about the layer.
OF_THE_PLUGIN = {"platform", "allow_stock"}


def test_settings_and_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", DOCUMENT, re.MULTILINE)
    defaults = {
        variable.name: str(int(v)) if isinstance(v := variable.default, bool) else str(v)
        for variable in VARIABLES
    }
    listed = dict(rows)
    assert len(listed) == len(rows) >= 9
    assert listed == {name: defaults[name] for name in listed}
    assert listed.keys() | OF_THE_PLUGIN <= defaults.keys()
