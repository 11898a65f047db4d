"""Plan a training step: costs of operations, simulation, and search for the best buckets."""

from typing import Final

REPORT: Final = "plan report"
"""Key of the runtime's entry for the report of the latest plan, see `mcr.plan_report`."""
MEASURED: Final = "plan measured"
"""Key of the runtime's entry for the measurements of libraries by all ranks, see `CapturedStep.measured`."""
