"""The progress of each rank of a group, visible to the others without communication.

Every rank owns a row: a counter of the operations it has issued, a ring in which it posts an operation's
32-bit digest and description (and for vector collectives how much it sends to and expects from each rank),
and the reason if it failed. Only the owner writes its row. Peers read it to compare signatures
before an operation starts, and to find ranks that have not arrived or will not come; no rank waits for
another here.

On one host the rows lie in anonymous shared memory (`shared`). Across hosts, or where that fails on any rank,
a row is one value of the job's store (`store`).
"""
