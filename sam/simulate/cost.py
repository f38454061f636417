"""The tables of step costs that this package ships."""

from __future__ import annotations

from pathlib import Path

from sam.switch.step_cost import StepCost

SHIPPED = Path(__file__).parent / "step_costs"


def load_step_cost(name: str) -> StepCost:
    """Load a table from a file, or by the name of one that this package ships.

    Raises:
        ValueError: no such file or name, or not a table.
    """
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        return StepCost.load(path)
    if (shipped := SHIPPED / f"{name}.json").is_file():
        return StepCost.load(shipped)
    raise ValueError(f"step cost {name!r}: neither a file nor one of {', '.join(shipped_step_costs())}")


def shipped_step_costs() -> list[str]:
    """Names of the tables that this package ships."""
    return sorted(path.stem for path in SHIPPED.glob("*.json") if not path.stem.startswith("acceptance"))
