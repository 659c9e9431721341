"""What happens to receipts: emitting, seals, archive, export and import, schedules, escalation."""
