"""The scheduler: a program beside a gate that creates tasks at the times that agents ordered (spec 8)."""
