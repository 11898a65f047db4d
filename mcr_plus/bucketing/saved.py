"""Files of bucket plans, with buckets as names of parameters, for `fuse: {plan: FILE}`.

    {"version": 1, "model": "0f3a…", "ranks": 8, "nodes": 2, "ranks_per_node": 4,
     "buckets": [{"params": ["head.weight", "head.bias"], "library": "gloo"}, …]}

Buckets are in the order of sending. `library` and `codec` are omitted, or null, if the pipeline chooses.
`nodes`, `ranks_per_node` and `tables` (the digests of the tables used for the plan) are compared if present.
`unused` lists parameters without a gradient in the captured step; jobs send their gradients after the
buckets, in further buckets by size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from mcr_plus import registry
from mcr_plus.config.document import path_text, read_bytes, write_text
from mcr_plus.config.names import backend_name, stored_backend
from mcr_plus.config.schema import Config
from mcr_plus.errors import ConfigError, short, unknown


def _known_codec(name: str | None) -> str | None:
    if name is not None and name not in (known := registry.names("codecs")):
        raise ValueError(unknown("codec", name, known))
    return name


class SavedBucket(BaseModel):
    """Parameters whose gradients are sent together, with library and codec."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    params: tuple[str, ...] = Field(min_length=1)
    library: Annotated[str | None, AfterValidator(stored_backend)] = None
    codec: Annotated[str | None, AfterValidator(_known_codec)] = None


def digests(config: Config) -> tuple[str, ...]:
    """Return the digests of the tables in a pipeline; raises `ConfigError` if one cannot be read."""
    return tuple(dict.fromkeys(ref.digest() for ref in config.tables))


class SavedPlan(BaseModel):
    """Buckets of a model's gradients on a number of ranks.

    `model`: hash of the parameters' names, shapes and dtypes, see `model_hash`. `ranks_per_node`:
    maximum over nodes. `tables`: digests of the tables with the costs of buckets. `unused`: parameters
    without a gradient on any rank, which are in no bucket. None: unknown.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: Literal[1] = 1
    model: str
    ranks: int = Field(ge=1)
    nodes: int | None = Field(default=None, ge=1)
    ranks_per_node: int | None = Field(default=None, ge=1)
    tables: tuple[str, ...] | None = None
    unused: tuple[str, ...] | None = None
    buckets: tuple[SavedBucket, ...] = Field(min_length=1)

    @property
    def codecs(self) -> list[str]:
        """Codecs of the buckets, sorted."""
        return sorted({each.codec for each in self.buckets if each.codec is not None})

    @classmethod
    def load(cls, path: Path, place: str | None = None) -> SavedPlan:
        """Read a file written by `save`; errors begin with `place`, by default the path.

        Raises:
            ConfigError: the file cannot be read, or is invalid.
        """
        place = str(path) if place is None else place
        content = read_bytes(path, place)
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            from mcr_plus.bucketing.step_file import line_of  # only needed for a wrong file

            first = error.errors(include_url=False)[0]
            line = line_of(content.decode(errors="replace"), first["loc"])
            where = f"{place}:{line}" if place == str(path) else f"{place}: {path.name}:{line}"
            what = f"{path_text(first['loc'])}: {first['msg'][:1].lower()}{first['msg'][1:]}"
            got = "" if first["type"] in ("missing", "json_invalid") else f", got {short(first['input'])}"
            raise ConfigError(
                f"{where}: {what}{got}; expected a plan that `mcr-plus plan -o` wrote"
            ) from None

    def save(self, path: Path) -> None:
        """Write the plan as JSON, one bucket per line; raises `ConfigError` if the file cannot be written."""
        about = json.dumps(self.model_dump(mode="json", exclude={"buckets"}, exclude_none=True))
        lines = ",\n".join("  " + json.dumps(bucket.model_dump()) for bucket in self.buckets)
        write_text(path, f'{about[:-1]},\n "buckets": [\n{lines}\n ]}}\n')

    def difference(
        self,
        model: str,
        names: Sequence[str],
        ranks: int,
        libraries: Sequence[str],
        nodes: int | None = None,
        ranks_per_node: int | None = None,
        tables: tuple[str, ...] | None = None,
    ) -> str | None:
        """Describe the first difference between a job and this plan; return None without a difference.

        Fields that are None on one side are not compared.

        Args:
            model: hash of the job's model. names: names of its parameters with gradients.
            ranks: number of the job's ranks. libraries: libraries that can send buckets. nodes: number of
                nodes. ranks_per_node: maximum over nodes. tables: `digests` of the job's pipeline.
        """
        planned = [name for bucket in self.buckets for name in bucket.params] + list(self.unused or ())
        if len(set(planned)) < len(planned):
            twice = next(name for at, name in enumerate(planned) if name in planned[:at])
            return f"parameter {twice!r} is in two buckets"
        known = set(names)
        for name in planned:
            if name not in known:
                return f"parameter {name!r} is in the plan, but not among the gradients of this model"
        known = set(planned)
        for name in names:
            if name not in known:
                return f"parameter {name!r} of this model is not in the plan"
        if model != self.model:
            return (
                f"shapes or dtypes of parameters differ: the model is {model}, the plan is for {self.model}"
            )
        # Buckets fit the model, but were chosen for the costs of a certain cluster and its tables.
        for what, here, there in (
            ("ranks", ranks, self.ranks),
            ("nodes", nodes, self.nodes),
            ("ranks per node", ranks_per_node, self.ranks_per_node),
        ):
            if None not in (here, there) and here != there:
                return f"the plan is for {there} {what}, and this job has {here}"
        if None not in (tables, self.tables) and tables != self.tables:
            own, stored = (
                ", ".join(each[:8] for each in known or ()) or "none" for known in (tables, self.tables)
            )
            return f"the plan was made with other tables: digests {stored}, and here {own}"
        for bucket in self.buckets:
            if bucket.library is not None and backend_name(bucket.library) not in libraries:
                return f"library {bucket.library!r} is not among those of this job: {', '.join(libraries)}"
        return None
