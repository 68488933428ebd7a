"""What `leyden new` renders: a folder per template, and their registration."""
