"""Sends and receives with codecs whose receivers keep values; the receiver first states its version.

    receiver → sender    version and digest of the receiver's values
    sender → receiver    the length of a payload: of the changes, or of all values if versions differ
    sender → receiver    the payload

So the two ends always agree about a payload, even after errors on either end. But a send completes only
after the receive has been posted, like MPI_Ssend.

These messages have their own tags, because they wait for each other, while a message without the codec is
issued at once. Under a common tag it could overtake one of them.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from mcr_plus.compression.codec import Codec
from mcr_plus.compression.schemes import MakeState, Scheme
from mcr_plus.core.buffers import Pool
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.work import JointWork, Work
from mcr_plus.errors import BackendError, InvalidArgument, Unsupported
from mcr_plus.pipeline.stage import Issue, Next

if TYPE_CHECKING:
    from mcr_plus.compression.delta import DeltaState

TAGS: Final = 1 << 21
"""Limit of message tags; tags from 1 << 23 on belong to the layout, and gloo's end at 1 << 24."""
_PAYLOADS: Final = TAGS
"""Offset from the tag of a message to the tag of its length and payload."""
_HELD: Final = 2 * TAGS
"""Offset from the tag of a message to the tag of the receiver's version."""
Last = MutableMapping[tuple[str, int, int], Work]


class CompressedMessages(Scheme):
    """Scheme of both ends of a message. `last`: the message in flight, by kind, peer and tag.

    `named`: see `Group.named`.
    """

    def __init__(
        self,
        codec: Codec,
        signature: Signature,
        rank: int,
        make_state: MakeState,
        pool: Pool,
        *,
        named: Callable[[int], str],
        last: Last,
    ) -> None:
        super().__init__(codec, signature, rank, make_state, pool)
        self._named, self._last = named, last

    @property
    def description(self) -> str:  # noqa: D102
        return "the receiver tells its version; the sender sends the changes since, which are applied"

    def bind(self, next: Next) -> Issue:  # noqa: D102
        signature = self.signature
        sends = signature.kind == "send"
        numbers = signature.replace(dtype=torch.int64, parts=None, key=None)
        self._held = numbers.replace(kind="recv" if sends else "send", shape=(2,), nbytes=16)
        self._length = numbers.replace(shape=(1,), nbytes=8)
        self._wire = signature.replace(
            dtype=self.payloads.wire_dtype, shape=(), nbytes=None, parts=None, key=None
        )
        self._issue_held, self._issue_length = next(self._held), next(self._length)
        self._issue_wire = next(self._wire)
        self._room = self.payloads.room(self.numel, signature.dtype)
        return Issue(self._send if sends else self._receive)

    def _begin(self, message: Message) -> tuple[dict[str, Any], dict[str, Any], Work | None]:
        """Return the fields of messages in both directions, and the work that must complete first."""
        peer, tag = message.peer, message.match_tag
        if peer is None:
            raise Unsupported(
                f"codec {self.codec.name}: a receive from any rank; expected src=, because received values "
                "are kept per rank"
            )
        if tag >= TAGS:
            raise InvalidArgument(f"codec {self.codec.name}: tag {tag}; expected less than {TAGS}")
        last, after = self._last.get((self.signature.kind, peer, tag)), message.after
        if last is not None and after is not None:
            after = JointWork([after, last], self.signature.kind, nbytes=0)
        there, back = ({"peer": peer, "match_tag": tag + added} for added in (_PAYLOADS, _HELD))
        return there, back, after or last

    def _send(self, message: Message) -> Work:
        there, back, after = self._begin(message)
        lease, rest = self.begin(message)
        rest.update(there)
        peer, tag = back["peer"], message.match_tag
        values, wire = message.inputs[0].view(-1), lease.tensor(self._room, self.payloads.wire_dtype)
        state, earlier = self._kept(values), message.prepare
        held, length = _numbers(2, values.device), _numbers(1, values.device)

        def encode() -> None:
            if earlier is not None:
                earlier()
            version, digest = held.tolist()
            length[0] = state.encode_for((peer, tag), values, wire, version, digest & (1 << 64) - 1)

        asked = self._issue_held(Message(self._held, (), (held,), **back))
        ready = asked if after is None else JointWork([after, asked], "send", nbytes=0)
        told = self._issue_length(Message(self._length, (length,), (), **there, after=ready, prepare=encode))
        payload = Message(self._wire, (), (), **rest, after=told)

        def fill() -> None:
            payload.inputs = (wire[: int(length)],)

        payload.prepare = fill
        sent = self._issue_wire(payload)
        sent.then(lease.release)
        self._comes_before(("send", peer, tag), sent)
        return self.handle([asked, told, sent], rest)

    def _receive(self, message: Message) -> Work:
        there, back, after = self._begin(message)
        lease, rest = self.begin(message)
        rest.update(there)
        peer, tag = back["peer"], message.match_tag
        out, wire = message.outputs[0].view(-1), lease.tensor(self._room, self.payloads.wire_dtype)
        state, earlier, refused = self._kept(out), message.prepare, list[BackendError]()
        held, length = _numbers(2, out.device), _numbers(1, out.device)

        def ask() -> None:
            if earlier is not None:
                earlier()
            version, digest = state.expect((peer, tag))
            held[0], held[1] = version, digest - (digest >> 63 << 64)

        # All three messages are issued now; each waits for its predecessor without blocking the caller.
        asks = self._issue_held(Message(self._held, (held,), (), **back, after=after, prepare=ask))
        told = self._issue_length(Message(self._length, (), (length,), **there, after=after))
        payload = Message(self._wire, (), (), **rest, after=told)

        def fill() -> None:
            nbytes = int(length)
            if not 0 <= nbytes <= self._room:
                raise BackendError(
                    f"codec {self.codec.name}: a payload of {nbytes} bytes from {self._named(peer)}; "
                    f"expected at most {self._room} for {self.signature.describe()}"
                )
            payload.outputs = (wire[:nbytes],)

        def decode() -> None:
            try:
                state.decode_message((peer, tag), wire[: int(length)], out)
            except BackendError as error:
                refused.append(error)

        def refuse() -> None:
            if refused:
                raise refused[0]

        payload.prepare = fill
        received = self._issue_wire(payload)
        received.then(lease.release_after(decode))
        self._comes_before(("recv", peer, tag), received)
        # Only the handle raises the error. The next message requests all values, so later calls succeed.
        return self.handle([asks, told, received], rest).then(refuse)

    def _comes_before(self, place: tuple[str, int, int], work: Work) -> None:
        """Make the next message of this kind, peer and tag wait until `work` is complete."""
        self._last[place] = work

        def forget() -> None:
            if self._last.get(place) is work:
                del self._last[place]

        work.then(forget)

    def _kept(self, values: torch.Tensor) -> DeltaState:
        # A cast, because an import would load kernels even in jobs without a codec.
        return cast("DeltaState", self.state(values, 0))


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    """Return a tensor of numbers on the values' device, to be sent by the same library."""
    with torch.inference_mode(False):  # other threads write the tensor
        return torch.zeros(count, dtype=torch.int64, device=device)
