"""Backend `msccl` on GPUs: a library with NCCL's C ABI that runs algorithm files itself.

Examples are MSCCL's executor for NCCL, and RCCL. The library's own scheduler picks algorithms from the folder
MSCCL_ALGO_DIR. This backend is untested, both on GPUs and with such libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from mcr_plus.backends.base import Preference, Support
from mcr_plus.backends.nccl import NcclBackend
from mcr_plus.backends.nccl.abi import load
from mcr_plus.core.environment import default_variable, msccl_library
from mcr_plus.errors import ConfigError
from mcr_plus.msccl import catalog

if TYPE_CHECKING:
    from mcr_plus.core.message import Signature
    from mcr_plus.rendezvous.world import World

_FOLDER: Final = "MSCCL_ALGO_DIR"


class MscclLibraryBackend(NcclBackend):
    """The library named by MCR_MSCCL_LIBRARY, with the configuration's algorithm files."""

    name = "msccl"
    has_algorithms = True
    preference = Preference(cpu=1)
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
        """Version of NCCL that the library reports."""
        return f"{cls.library}, NCCL {load(cls.library).version_text}"

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        """Support what NCCL supports, but no named algorithms: the library picks them."""
        if signature.algorithm is not None:
            return Support("no", f"algorithm '{signature.algorithm}'; {cls.library} picks its own")
        return super().supports(signature)
