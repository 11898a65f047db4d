"""Hook by which bucket plans take part in events of the job."""

from __future__ import annotations

from mcr_plus.job.hooks import JobHook


class BucketingHook(JobHook):
    """Hook that checks plans in a loaded state, before a model looks for its own plan."""

    def accepts(self, stage: str, entry: object) -> bool:
        """Return whether an entry of a loaded state is valid, see `JobHook`."""
        if stage != "plan":
            return True
        from mcr_plus.bucketing.given_plan import is_plan  # only loaded states need it

        return is_plan(entry)
