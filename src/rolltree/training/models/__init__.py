"""What only some models or settings ask for: adapters, ranks, recurrence, routed experts."""
