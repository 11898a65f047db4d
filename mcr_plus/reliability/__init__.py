"""Operations that survive a failing library (`failover`), and that check their payloads (`verify`)."""
