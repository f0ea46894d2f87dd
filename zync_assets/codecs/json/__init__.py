"""Plain JSON texts and columns."""
