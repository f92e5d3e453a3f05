"""The block server: sessions, the compute thread, stacked micro-batches and schedules."""
