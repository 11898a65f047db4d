"""Plans of a training step: costs of its operations, a simulation, and the search for the best buckets."""

from typing import Final

REPORT: Final = "plan report"
"""Under this name the runtime keeps the report of the latest plan, see `mcr.plan_report`."""
MEASURED: Final = "plan measured"
"""Under this name it keeps what all ranks have measured of libraries, see `Step.measured`."""
