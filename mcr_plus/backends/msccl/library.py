"""The backend `msccl` on GPUs: a library with NCCL's C ABI that runs algorithm files itself.

Such as MSCCL's executor for NCCL, or RCCL. Its own scheduler picks the algorithms, out of a folder that it is
told by MSCCL_ALGO_DIR. Has not run on a GPU, nor with any such library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from mcr_plus.backends.msccl import catalog
from mcr_plus.backends.nccl import NcclBackend
from mcr_plus.backends.nccl.abi import load
from mcr_plus.environment import default_variable, msccl_library
from mcr_plus.errors import ConfigError
from mcr_plus.interfaces import Support

if TYPE_CHECKING:
    from mcr_plus.interfaces import World
    from mcr_plus.message import Signature

_FOLDER: Final = "MSCCL_ALGO_DIR"


class MscclLibraryBackend(NcclBackend):
    """The library that MCR_MSCCL_LIBRARY names, with the configuration's algorithm files."""

    name = "msccl"
    library: ClassVar[str | None] = msccl_library()

    def __init__(self, world: World, **options: Any) -> None:
        folders = sorted({str(path.parent.resolve()) for path in catalog.paths()})
        if len(folders) > 1:
            raise ConfigError(
                f"algorithms: backend msccl passes one folder to {self.library}, not {', '.join(folders)}"
            )
        if folders:
            default_variable(_FOLDER, folders[0])
        super().__init__(world, **options)

    @classmethod
    def library_version(cls) -> str:
        """NCCL's version that the library says it has."""
        return f"{cls.library}, NCCL {load(cls.library).version_text}"

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        """As NCCL; algorithms cannot be named, for the library picks them."""
        if signature.algorithm is not None:
            return Support("no", f"algorithm '{signature.algorithm}'; {cls.library} picks its own")
        return super().supports(signature)
