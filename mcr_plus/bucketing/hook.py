"""The part of bucket plans in each job."""

from __future__ import annotations

from mcr_plus.job.hooks import JobHook


class BucketingHook(JobHook):
    """Checks plans in a state that is loaded, before a model looks for its own."""

    def accepts(self, stage: str, entry: object) -> bool:
        """See `JobHook`."""
        if stage != "plan":
            return True
        from mcr_plus.bucketing.given_plan import is_plan  # for a state that is loaded, alone

        return is_plan(entry)
