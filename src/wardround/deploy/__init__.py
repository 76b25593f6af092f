"""A federation of real hospitals: who may take part, what each side keeps, and how messages get across."""
