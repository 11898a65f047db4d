"""Programs that go on when ranks are lost or join: `mcr.elastic`, `mcr.shrink`, `mcr.reconfigure`."""
