"""The block server: sessions, the compute thread, stacks and schedules."""
