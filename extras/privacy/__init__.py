"""What the gate owes to those whose data it keeps: all of it on request, or none of it any more (spec 21.12.1)."""
