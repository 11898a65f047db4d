"""Board of a group: each rank's progress, which other ranks read without communication.

Every rank owns a row: a counter of issued operations, a ring of operations with 32-bit digest and description
(for vector collectives also the counts sent to and expected from each rank), and the reason for a failure.
Only the owner writes a row. Peers read it to compare signatures before an operation starts, and to find ranks
that have not arrived or will not come; no rank waits for another here.

On one host the rows are in anonymous shared memory (`shared`). Across hosts, or if shared memory fails on any
rank, a row is one value in the job's store (`store`).
"""
