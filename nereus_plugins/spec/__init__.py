"""The vocabulary: model, cluster, workload, layout, plan.

Every record is immutable, checked when it is made (`SpecError` names the rule broken and the
setting to change), and reads from and writes to dict, JSON and YAML.
"""

from .layout import SHARDINGS, Coord, ExpertCoord, Layout
from .plan import Assignment, GlobalPlan, Knobs, ModelStage
from .record import FrozenMap, Record, SpecError

__all__ = [
    "SHARDINGS",
    "Assignment",
    "Coord",
    "ExpertCoord",
    "FrozenMap",
    "GlobalPlan",
    "Knobs",
    "Layout",
    "ModelStage",
    "Record",
    "SpecError",
]
