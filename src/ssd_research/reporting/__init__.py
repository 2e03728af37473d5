"""What the `report` stage reads from finished runs, and the tables and pictures made of it."""
