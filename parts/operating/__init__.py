"""What people who look after a gate ask of it: what there is, and to do it again."""
