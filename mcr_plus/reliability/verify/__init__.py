"""Operations whose payload is verified: what has arrived is compared with what was sent, on all ranks."""
