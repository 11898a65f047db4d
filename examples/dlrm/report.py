"""What came out of a DLRM job: how well it learned to tell clicks, and the figures of any job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from comparing import Columns
from numpy.typing import NDArray
from reporting import Outcome, known, report_outcome
from rich.console import Console

COLUMNS: Columns = (("train loss", "final_loss", ".4f"), ("AUC", "auc", ".4f"))


def auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Chance that a random positive scores above a random negative, a tie counting half; nan if undefined."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]  # equal scores share their mean rank
    positives = int(np.sum(labels == 1))
    negatives = len(labels) - positives
    if not positives or not negatives:
        return math.nan
    rank_sum = float(ranks[labels == 1].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def log_loss(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Mean binary cross entropy of the logits `scores`; nan without rows."""
    return float(np.mean(np.logaddexp(0, scores) - labels * scores)) if len(labels) else math.nan


def accuracy(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Share of rows on the right side of one half; nan without rows."""
    return float(np.mean((scores > 0) == (labels == 1))) if len(labels) else math.nan


@dataclass(frozen=True)
class Result(Outcome):
    """What came out, the same on every rank but for the times and the log."""

    labels: NDArray[np.float32]  # of the held-out rows of all ranks
    scores: NDArray[np.float32]


def report(result: Result, console: Console) -> None:
    """Print how well it learned, how fast it was, and where the time went."""
    rows = (result.labels, result.scores)
    held_out = (
        f"{len(result.labels)} rows: loss {log_loss(*rows):.4f}, accuracy {accuracy(*rows):.1%}, "
        f"AUC {auc(*rows):.4f}"
    )
    facts = [("held out", held_out)] if len(result.labels) else []
    report_outcome(result, facts, "samples", console)


def document(result: Result, title: str) -> dict[str, Any]:
    """The report for programs."""
    rows = (result.labels, result.scores)
    return result.document(title) | {
        "samples_per_second": result.speed,
        "held_out": {
            "rows": len(result.labels),
            "loss": known(log_loss(*rows)),
            "accuracy": known(accuracy(*rows)),
            "auc": known(auc(*rows)),
        },
    }
