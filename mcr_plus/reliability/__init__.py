"""Operations that survive the failure of a library (`failover`) or check their payloads (`verify`)."""
