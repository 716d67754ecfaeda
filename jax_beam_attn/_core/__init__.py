"""What the operators share: each idea is written here once."""
