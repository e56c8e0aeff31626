"""Power supply of this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

SUPPLIES = Path("/sys/class/power_supply")


def on_battery() -> bool:
    """Return whether a battery powers this machine: it discharges, and no mains is online. False where unknown."""
    supplies = [_facts(folder) for folder in sorted(SUPPLIES.glob("*"))]
    mains = [facts["online"] == "1" for facts in supplies if facts["type"] == "Mains"]
    discharging = any(facts["type"] == "Battery" and facts["status"] == "Discharging" for facts in supplies)
    return discharging and bool(mains) and not any(mains)


def _facts(folder: Path) -> dict[str, str]:
    facts = dict.fromkeys(("type", "online", "status"), "")
    for name in facts:
        with suppress(OSError, UnicodeDecodeError):
            facts[name] = (folder / name).read_text().strip()
    return facts
