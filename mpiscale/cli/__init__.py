"""The program `mpiscale`: commands and their options."""
