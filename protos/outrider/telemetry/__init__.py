"""Every span, attribute and metric by name, and what records them."""
