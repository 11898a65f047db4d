"""Calls after the first on real ranks: memory that tensors share and that is kept, dtypes, and mistakes that
one rank makes alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import layout_oracle as oracle
import torch
from jobs.layout.redistributions import Model, Report, do, do_state, expected, job, local, one_state, wrong

import mcr_plus as mcr
from mcr_plus import autograd
from mcr_plus.job.init import current
from mcr_plus.layout import Layout


def caught(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the error of a call, and its message."""
    try:
        call()
    except mcr.McrError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def shared(backend: str) -> dict[str, Any]:
    """Run on two ranks: tensors of different names and dtypes in the same memory."""
    report = Report()
    with job(backend) as comm:
        rank, other = comm.rank, 1 - comm.rank
        rows, swapped = Layout.sharded((4, 2), [0, 1], 0), Layout.sharded((4, 2), [1, 0], 0)
        move = mcr.redistribution({"a": (rows, swapped), "b": (rows, rows), "c": (rows, swapped)})
        flat = torch.zeros(12)
        a, b = flat[:4].view(2, 2), flat[4:8].view(2, 2)
        c = flat[8:].view(torch.int32).view(2, 2)
        late = mcr.redistribution({"w": (rows, swapped)})
        for turn in range(4):  # the first call, and calls with a known plan
            a.fill_(10 + rank + turn)
            b.fill_(20 + rank + turn)
            c.fill_(30 + rank + turn)
            source, target = {"a": a, "b": b, "c": c}, {"a": b, "b": a, "c": None}
            if turn % 2:
                work = move.start(source, target)
                work.wait()
                found = work.outputs
            else:
                found = move(source, target)
            for name, right in (("a", 10 + other), ("b", 20 + rank), ("c", 30 + other)):
                value = found[name]
                assert value is not None
                same = value.tolist() == [[right + turn] * 2] * 2
                report.add(f"swapped, turn {turn}", None if same else f"{name}: {value}, not {right + turn}")
            report.add("in place", None if found["a"] is b else "another tensor")
            # in other dtypes: one tensor receives what the other sends
            c.fill_(30 + rank + turn)
            found = move(source, {"a": c.view(torch.float32), "c": flat[:4].view(torch.int32).view(2, 2)})
            same = found["c"].tolist() == [[30 + other + turn] * 2] * 2  # type: ignore[union-attr]
            report.add(f"of other dtypes, turn {turn}", None if same else f"c: {found['c']}")
            wide = torch.zeros(2, 4)
            halves = {"a": wide[:, :2], "b": wide[:, 2:]}  # apart, though their ranges of memory are not
            move(source, halves)
            same = wide[:, 2:].equal(source["b"])
            report.add("interleaved", None if same else f"{wide}")
            for meeting in ({"a": flat[1:5].view(2, 2), "b": b}, {"a": wide[:, :2], "b": wide[:, :2]}):
                kind, text = caught(partial(move, source, meeting))
                fine = kind == "InvalidArgument" and "'a' and 'b' share memory" in text
                report.add("outputs that meet", None if fine else f"{kind}: {text}")
        for _ in range(2):
            kind, text = caught(lambda: late({"w": a}, {"w": torch.ones(1).expand(2, 2)}))
            report.add("an output of one element", None if kind == "InvalidArgument" else f"{kind}: {text}")
    return report.value()


def latest(backend: str) -> dict[str, Any]:
    """Run on two ranks: one starts to send before the other; dtypes change after the first call."""
    report = Report()
    with job(backend) as comm:
        rank = comm.rank
        here, there = Layout.replicated((1000,), [0]), Layout.replicated((1000,), [1])
        move = mcr.redistribution({"w": (here, there), "v": (here, there)})
        looked: list[int] = []
        checked = do_state.checked

        def state(dtype: torch.dtype, turn: int) -> dict[str, torch.Tensor]:
            return {
                name: torch.full((1000,), turn + at, dtype=dtype) for at, name in enumerate("wv") if rank == 0
            }

        def right(found: Any, dtype: torch.dtype, turn: int, where: str) -> None:
            for at, name in enumerate("wv"):
                value = found[name]
                fine = (
                    value is None if rank == 0 else value.dtype is dtype and bool((value == turn + at).all())
                )
                report.add(where, None if fine else f"{name}: {value}")

        right(move(state(torch.float32, 1)), torch.float32, 1, "the first call")
        single = mcr.redistribute(state(torch.float32, 1).get("w"), here, there)
        report.add("one tensor", None if (single is None) == (rank == 0) else f"{single}")
        do_state.checked = lambda *args: looked.append(1) or checked(*args)  # type: ignore[func-returns-value]
        store = current().world.store
        assert store is not None
        with mcr.record() as log:
            for turn in (2, 3):
                comm.barrier()
                if rank == 1:  # not before: a start that waited for this rank would not end
                    store.wait([f"started {turn}"], timedelta(seconds=60))
                if turn == 2:
                    work = move.start(state(torch.float32, turn))
                else:
                    work = mcr.redistribute(state(torch.float32, turn).get("w"), here, there, async_op=True)
                store.set(f"started {turn}", "1") if rank == 0 else None
                work.wait()
                if turn == 2:
                    right(work.outputs, torch.float32, turn, "started")
        do_state.checked = checked
        kinds = [each.kind for each in log.records]
        report.add("looked up", None if not looked else f"{len(looked)} times")
        report.add("operations", None if "all_reduce" not in kinds else f"{kinds}")
        if rank == 0:  # which alone sees it
            kind, text = caught(lambda: move(state(torch.float64, 4)))
            fine = kind == "InvalidArgument" and "float64" in text and "float32" in text and "prepare" in text
            report.add("another dtype", None if fine else f"{kind}: {text}")
            kind, text = caught(lambda: mcr.redistribute(torch.ones(1000).half(), here, there))
            fine = kind == "InvalidArgument" and "pass `dtype` on all ranks" in text
            report.add("another dtype of one tensor", None if fine else f"{kind}: {text}")
        comm.barrier()
        for dtype in (torch.float64, torch.float32, torch.float64):
            move.prepare([dtype, dtype])
            right(move(state(dtype, 5)), dtype, 5, f"prepared for {dtype}")
        for dtype in (torch.float64, torch.float16, torch.float64):
            x = None if rank else torch.ones(1000, dtype=dtype)
            found = mcr.redistribute(x, here, there, dtype=dtype)
            fine = found is None if rank == 0 else found is not None and found.dtype is dtype
            report.add(f"dtype={dtype}", None if fine else f"{found}")
        kinds_, texts = zip(*[caught(lambda: move.prepare([torch.float32])) for _ in range(1)], strict=True)
        report.add("dtypes", None if "expected 2" in texts[0] else f"{kinds_}: {texts}")
    return report.value()


def kept(backend: str) -> dict[str, Any]:
    """Run on two ranks; return the plans and buffers that a group keeps for `redistribute`."""
    report = Report()
    do_redistribute: Any = import_module("mcr_plus.layout.redistribute")
    with job(backend) as comm:
        rank, ranks = comm.rank, range(comm.size)

        def go(number: int, also: int = 0) -> None:
            source, target = (Layout.sharded((2 * number, 2 * number), ranks, dim) for dim in (0, 1))
            found = mcr.redistribute(torch.full((number, 2 * number), float(rank)), source, target)
            right = torch.arange(comm.size).repeat_interleave(number)[:, None].expand(-1, number)
            fine = found is not None and torch.equal(found, right.float())
            report.add(f"pair {number}{also}", None if fine else f"{found}")

        report.add("number", None if do_redistribute._KEPT == 1024 else "another number of plans")
        do_redistribute._KEPT = 4
        kind, text = caught(lambda: go(100 + rank))  # other layouts on each rank, for once
        report.add("a mistake", None if kind == "InvalidArgument" else f"{kind}: {text}")
        for number in (100, 1, 2, 3, 100, 1, 2, 3, 4, 100, 101, 1):
            go(number)
        do_redistribute._KEPT = 1024
        do_redistribute._BUFFERS = limit = 1 << 20
        held = comm.attached["redistributions"]
        for number in (200, 250, 300, 200, 350, 400, 1000, 250):  # 1000: more than the limit
            go(number)
            used = sum(move.buffer_bytes for move in held.moves.values())
            report.add("kept", None if used <= limit else f"{used} bytes of buffers")
            report.add("kept", None if used or number == 1000 else "no buffers")
    return report.value()


def limits(backend: str) -> dict[str, Any]:
    """Run on two ranks; return the memory of buffers, with sums among the tensors and with several dtypes."""
    report = Report()
    with job(backend) as comm:
        rank, ranks = comm.rank, range(comm.size)
        shape = (100, 1024)
        rows, columns = (oracle.mesh(shape, ranks, [each]) for each in ("S0", "S1"))
        addends = oracle.mesh(shape, ranks, ["P"])
        many = {
            **{f"sum {at}": (addends, rows, torch.float32) for at in range(7)},
            **{f"plain {at}": (rows, columns, torch.float32) for at in range(12)},
        }
        dtypes = (torch.float32, torch.int64, torch.bfloat16)
        several = {f"{at} {dtype}": (rows, columns, dtype) for at in range(4) for dtype in dtypes}
        sums = {f"sum {at}": (addends, rows, torch.float32) for at in range(5)}
        for what, sides in (("sums and others", many), ("dtypes", several), ("sums", sums)):
            known = Model(
                {name: (one, two) for name, (one, two, _) in sides.items()},
                {name: dtype for name, (*_, dtype) in sides.items()},
            )
            specs = {name: (one.layout, two.layout) for name, (one, two, _) in sides.items()}
            limit = 1 << 20
            move = mcr.redistribution(specs, memory=limit)
            for turn in range(4):
                one_state(report, move, known, rank, turn, f"{what}, turn {turn}")
                used = move.buffer_bytes
                report.add(what, None if used <= limit else f"turn {turn}: buffers of {used} bytes")
            used = move.buffer_bytes
            report.add(what, None if used > limit // 4 else f"only {used} bytes")
            work = [move.start(inputs(known, rank), None) for _ in range(3)]
            for each in work:
                each.wait()
            used = move.buffer_bytes
            report.add(what, None if used <= limit else f"after several at once: {used} bytes")
            plan = move.plan
            names = [spec.name for spec in plan.specs]
            fine = names == list(specs) and len(plan.bounds()) == len(specs) and "bound" in plan.describe()
            report.add(what, None if fine else f"the plan is of {names}")
    return report.value()


def inputs(known: Model, rank: int) -> dict[str, torch.Tensor | None]:
    """This rank's tensors of a state."""
    return {name: local(before, rank, known.dtypes[name], 0) for name, (before, _) in known.sides.items()}


def repeated(backend: str) -> dict[str, Any]:
    """Run on two ranks: the same tensors again and again, other ones between, and their memory."""
    report = Report()
    with job(backend) as comm:
        rank, ranks = comm.rank, range(comm.size)
        source, target = (oracle.mesh((8, 8), ranks, [each]) for each in ("S0", "S1"))
        move = mcr.redistribution({"": (source.layout, target.layout)})

        def values(salt: int) -> torch.Tensor:
            found = local(source, rank, torch.float32, salt)
            assert found is not None
            return found

        x, out = torch.empty(4, 8), torch.empty(8, 4)
        for turn in range(8):
            x.copy_(values(turn))
            if turn == 5:
                work = move.start({"": x}, {"": out})  # its buffers are in use
                x.copy_(x)
                second = move({"": x})[""]
                work.wait()
                report.add("meanwhile", wrong(second, expected(source, target, rank, torch.float32, turn)))
            elif turn == 6:
                x.data = torch.empty(4, 8).copy_(values(turn))  # other memory
                move({"": x}, {"": out})
            else:
                move({"": x}, {"": out})
            report.add(f"turn {turn}", wrong(out, expected(source, target, rank, torch.float32, turn)))
        for _ in range(3):
            move({"": x}, {"": out})
        memory = weakref.ref(x.untyped_storage()), weakref.ref(x)
        del x
        report.add("freed", None if memory[1]() is None else "the tensor is kept")
        (_, mover), *_ = next(iter(move._bound.values()))[1]
        (buffers,) = mover.pool.idle[0].buffers.values()  # type: ignore[union-attr]
        report.add("freed", None if buffers.repeated is None else "views are kept")
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            move.release()
            with mode():
                x, out = torch.empty(4, 8), torch.empty(8, 4)
                for turn in range(4):
                    x.copy_(values(turn))
                    move({"": x}, {"": out})
                    right = expected(source, target, rank, torch.float32, turn)
                    report.add(f"{mode.__name__}, turn {turn}", wrong(out, right))
            out = torch.empty(8, 4)
            move({"": values(5)}, {"": out})
            right = expected(source, target, rank, torch.float32, 5)
            report.add(f"after {mode.__name__}", wrong(out, right))
        x = values(9)
        move({"": x}, {"": out})
        report.add("another", wrong(out, expected(source, target, rank, torch.float32, 9)))
    return report.value()


def alone(backend: str) -> dict[str, Any]:
    """Run on ranks: mistakes in the arguments of the last rank, or of all."""
    said: dict[str, Any] = {}
    report = Report()
    with job(backend) as comm:
        number, rank = comm.size, comm.rank
        ranks, last = range(number), rank == number - 1
        rows, columns = Layout.sharded((6, 4), ranks, 0), Layout.sharded((6, 4), ranks, 1)
        outside = Layout.replicated((6, 4), [number])
        x = torch.ones(rows.local_shape(rank) or ())
        replicas: Any = "mean" if last else "same"
        nothing: Any = "S1" if last else columns
        widths: Any = 1.5 if last else 1
        empty: dict[str, tuple[Layout, Layout]] = {}
        calls: dict[str, Callable[[], Any]] = {
            "no layout": lambda: mcr.redistribute(x, rows, nothing),
            "no dtype": lambda: mcr.redistribute(x, rows, columns, dtype="f" if last else None),  # type: ignore[arg-type]
            "no replicas": lambda: autograd.redistribute(x, rows, columns, replicas),
            "no tensor": lambda: autograd.redistribute("x" if last else x, rows, columns),  # type: ignore[arg-type]
            "no widths": lambda: autograd.halo_exchange(x, rows, widths, 1),
            "an unknown name": lambda: mcr.redistribution(empty)({}, {"v": x} if last else None),
            "no source": lambda: mcr.redistribution(empty)(3 if last else {}),  # type: ignore[arg-type]
            "a source outside": lambda: mcr.redistribute(None, outside, columns),
        }
        source, target = (oracle.mesh((9, 5), comm.ranks, [each]) for each in ("S1", "S0"))
        for name, call in calls.items():
            said[name] = caught(call)
            found = mcr.redistribute(local(source, rank, torch.float32, 1), source.layout, target.layout)
            report.add(f"after {name}", wrong(found, expected(source, target, rank, torch.float32, 1)))
        for what, specs in (("a number", {3: (rows, columns)}), ("a list", [(rows, columns)])):
            said[what] = caught(partial(do.redistribution, specs))
        group = mcr.new_group(ranks)
        mcr.redistribute(x, rows, columns, group=group)
        said["a known plan"] = caught(lambda: mcr.redistribute(x, rows, nothing, group=group))
        report.add("nothing", None if mcr.redistribution(empty)({}) == {} else "something was moved")
        said["no plan"] = caught(lambda: mcr.redistribution(empty).plan)
    return {**report.value(), "said": said}
