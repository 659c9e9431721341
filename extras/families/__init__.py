"""Families: what is done with several tasks together; what each end changes is in parts/model/families.py."""
